"""Reports from a worker's queue to a driver's ledger: none twice, none out of order, and missing ones are counted."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.monitoring.report_acknowledgements import PRESSING_BYTES, ReportLedger
from elastic.monitoring.report_queue import KEPT, OVERHEAD_BYTES, WINDOW_BYTES, ReportQueue
from elastic.protocol.messages import Place, Reported, ReportsTaken, Worker

A, B = Worker("h", 0), Worker("h", 1)
PLACE = Place(2, 4, 0, 1, 0, 1)


def queue(*made: bytes, **limits: int) -> ReportQueue:
    new = ReportQueue(**limits)
    for metrics in made:
        new.add(3, PLACE, 1.5, metrics)
    return new


def sent(queue: ReportQueue) -> list[Reported]:
    """All that may be."""
    found = []
    while (report := queue.next()) is not None:
        found.append(report)
    return found


def brief(reports: list[Reported]) -> list[tuple[int, int, bytes]]:
    return [(report.number, report.oldest, report.metrics) for report in reports]


def test_report_is_sent_with_the_generation_and_place_of_its_creation():
    reports = queue(b"a")
    assert sent(reports) == [Reported(1, 1, 3, 2, 4, 1.5, b"a")]
    assert len(reports) == 1
    reports.taken(1)
    assert len(reports) == 0
    reports.add(4, PLACE, 2.5, b"b")
    assert reports.due
    assert sent(reports) == [Reported(2, 2, 4, 2, 4, 2.5, b"b")]


def test_unacknowledged_reports_are_sent_again_on_another_connection():
    reports = queue(b"a", b"b", b"c")
    assert brief(sent(reports)) == [(1, 1, b"a"), (2, 1, b"b"), (3, 1, b"c")]
    reports.taken(1)
    reports.resend()
    reports.add(3, PLACE, 1.5, b"d")
    assert brief(sent(reports)) == [(2, 2, b"b"), (3, 2, b"c"), (4, 2, b"d")]


def test_reports_in_flight_are_limited_by_the_window():
    large = b"x" * (WINDOW_BYTES // 2 - OVERHEAD_BYTES)
    reports = queue(*[large] * 5)
    assert [report.number for report in sent(reports)] == [1, 2]
    assert not reports.due
    reports.taken(1)
    assert [report.number for report in sent(reports)] == [3]
    reports.taken(3)
    assert [report.number for report in sent(reports)] == [4, 5]
    alone = queue(b"x" * 2 * WINDOW_BYTES)
    assert len(sent(alone)) == 1, "what is larger goes alone"


def test_oldest_reports_are_dropped_and_counted_when_the_queue_is_full():
    reports = queue(b"x" * (WINDOW_BYTES - OVERHEAD_BYTES))
    assert len(sent(reports)) == 1, "and no other fits beside it"
    for n in range(KEPT + 5):
        reports.add(3, PLACE, 1.5, b"%d" % n)
        assert not reports.due
    assert len(reports) == 1 + KEPT
    reports.taken(1)
    following = sent(reports)
    assert (following[0].number, following[0].metrics, following[0].dropped) == (2, b"5", 5)
    assert not any(report.dropped for report in following[1:])


def test_queued_bytes_are_limited():
    reports = queue(*[b"x" * 900] * 10, kept_bytes=5000)
    assert len(reports) == 5
    assert [(r.number, r.dropped) for r in sent(reports)][:2] == [(1, 5), (2, 0)]


# ---- the driver's side -------------------------------------------------------------------------------------------


def said(number: int, oldest: int = 1, *, dropped: int = 0, size: int = 1) -> Reported:
    return Reported(number, oldest, 3, 0, 1, 1.5, b"x" * size, dropped)


def test_each_report_is_accepted_once_and_acknowledged_again_when_repeated():
    ledger = ReportLedger()
    assert ledger.record(A, said(1)) and ledger.record(A, said(2)) and ledger.record(B, said(1))
    assert ledger.answers() == [(A, ReportsTaken(2)), (B, ReportsTaken(1))]
    assert ledger.answers() == []
    assert not ledger.record(A, said(1)) and not ledger.record(A, said(2))
    assert ledger.answers() == [(A, ReportsTaken(2))], "the answer was lost"
    assert ledger.record(A, said(3))


def test_report_that_arrives_before_lost_ones_must_be_sent_again():
    ledger = ReportLedger()
    assert ledger.record(A, said(1))
    assert not ledger.record(A, said(4))
    assert ledger.answers() == [(A, ReportsTaken(1))]
    assert [ledger.record(A, said(n)) for n in (2, 3, 4)] == [True] * 3


def test_next_driver_continues_after_the_last_acknowledged_report():
    ledger = ReportLedger()
    assert not ledger.record(A, said(9, oldest=7)), "7 and 8 were lost with the driver before"
    assert ledger.answers() == []
    assert [ledger.record(A, said(n, oldest=7)) for n in (7, 8, 9)] == [True] * 3
    assert not ledger.record(B, said(3, oldest=9))  # nonsense
    assert ledger.answers() == [(A, ReportsTaken(9)), (B, ReportsTaken(0))]


def test_worker_with_many_reports_in_flight_is_acknowledged_at_once():
    ledger = ReportLedger()
    ledger.record(A, said(1, size=PRESSING_BYTES // 2))
    assert not ledger.pressing(A)
    ledger.record(A, said(2, size=PRESSING_BYTES // 2))
    assert ledger.pressing(A) and not ledger.pressing(B)
    assert ledger.answer(A) == ReportsTaken(2)
    assert not ledger.pressing(A) and ledger.answers() == []


def test_an_exited_worker_is_forgotten():
    ledger = ReportLedger()
    ledger.record(A, said(1, dropped=2))
    ledger.record(B, said(1))
    ledger.keep({B})
    assert ledger.answers() == [(B, ReportsTaken(1))]
    assert ledger.dropped == {A: 2}, "what was lost has to be said all the same"
    assert ledger.record(B, said(2))


# ---- both, over connections that break ---------------------------------------------------------------------------


class Road:
    """A worker, an agent and successive drivers. Messages arrive in order, or not at all."""

    def __init__(self) -> None:
        self.queue = ReportQueue(kept=4, kept_bytes=10**9)
        self.up: deque[Reported] = deque()
        self.down: deque[ReportsTaken] = deque()
        self.ledger = ReportLedger()
        self.ledgers = [self.ledger]
        self.driver: list[int] = []
        self.drivers = [self.driver]
        self.made = 0

    def make(self) -> None:
        self.made += 1
        self.queue.add(1, PLACE, 1.0, b"%05d" % self.made + bytes(1000))
        self.up.extend(sent(self.queue))

    def hear(self) -> None:
        if self.up:
            report = self.up.popleft()
            if self.ledger.record(A, report):
                self.driver.append(int(report.metrics[:5]))

    def answer(self) -> None:
        self.down.extend(answer for _, answer in self.ledger.answers())
        if self.down:
            self.queue.taken(self.down.popleft().number)
            self.up.extend(sent(self.queue))

    def lose_and_go_on(self) -> None:
        """What is under way is lost; one report slips through before the worker is asked to say all again."""
        self.up.clear()
        self.down.clear()
        self.make()
        self.hear()
        self.queue.resend()
        self.up.extend(sent(self.queue))

    def another_driver(self) -> None:
        self.ledger, self.driver = ReportLedger(), []
        self.ledgers.append(self.ledger)
        self.drivers.append(self.driver)
        self.lose_and_go_on()

    def overflow(self) -> None:
        for _ in range(200):
            self.make()

    def finish(self) -> None:
        while len(self.queue):
            self.hear()
            self.answer()

    def check(self) -> None:
        self.finish()
        for driver in self.drivers:
            assert driver == sorted(set(driver)), "in order, and none twice"
        everything = set().union(*self.drivers)
        dropped = sum(ledger.dropped.get(A, 0) for ledger in self.ledgers)
        # A killed driver may have counted what the next one counts again.
        assert self.made - len(everything) <= dropped
        if len(self.drivers) == 1:
            assert self.made - len(everything) == dropped
        # Nothing lies between two drivers: the second begins where the first ended, or before.
        for before, after in zip(self.drivers, self.drivers[1:], strict=False):
            if before and after and not dropped:
                assert after[0] <= before[-1] + 1


STEPS = ["make", "hear", "answer", "lose_and_go_on", "another_driver"]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_no_report_is_missing_after_any_losses_of_messages(steps):
    road = Road()
    for step in steps:
        getattr(road, step)()
    road.check()
    assert len(set().union(*road.drivers)) == road.made, "the window had room for all"


@given(st.lists(st.sampled_from([*STEPS, "overflow"]), max_size=12))
def test_reports_without_room_are_counted_as_dropped(steps):
    road = Road()
    for step in ["overflow", *steps]:
        getattr(road, step)()
    road.check()
    assert any(ledger.dropped for ledger in road.ledgers)
