"""`elastic.report` in a worker, and a driver's processing of reports. No processes."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import Any

import pytest

import elastic
from elastic.driver.monitoring import report_delivery as reports_module
from elastic.driver.monitoring.report_delivery import Reports
from elastic.errors import DriverLost, Invalid, NotInitialized
from elastic.monitoring import reporting
from elastic.monitoring.report_queue import WINDOW_BYTES
from elastic.monitoring.reporting import Reporting
from elastic.protocol import messages
from elastic.protocol.messages import Place, Reported, ReportsTaken, Worker
from elastic.protocol.report_values import Report, packed, unpacked
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from harness.golden import raises, recorded
from unit.driver.job.test_driver_loop import A, B, Story

DEADLINE_S = 60.0
PLACE = Place(1, 2, 0, 1, 0, 1)


# ---- in the worker -------------------------------------------------------------------------------


class Link:
    """Records sent messages, or fails."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.broken = False

    def send(self, message: messages.Message) -> None:
        if self.broken:
            raise DriverLost("the connection to the driver broke")
        self.sent.append(message)

    def poke(self) -> None:
        pass

    def reports(self) -> list[Reported]:
        return [message for message in self.sent if isinstance(message, Reported)]


def initialized(monkeypatch, link: Any) -> WorkerRuntime:
    rt = WorkerRuntime(worker_settings.read({}), link)
    monkeypatch.setattr(lifecycle, "_runtime", rt)
    monkeypatch.setattr(lifecycle, "_initialized", True)
    return rt


@pytest.fixture
def worker(monkeypatch):
    """A runtime with a link, in a world of two."""
    link = Link()
    rt = initialized(monkeypatch, link)
    rt.session.recovery.place, rt.session.recovery.generation = PLACE, 3
    return rt, link


def test_report_before_init_raises_not_initialized(monkeypatch):
    monkeypatch.setattr(lifecycle, "_initialized", False)
    with raises(NotInitialized):
        elastic.report({"loss": 1.0})


def test_report_without_a_driver_only_checks_its_values(monkeypatch):
    rt = initialized(monkeypatch, None)
    assert rt.reporting is None
    elastic.report({"loss": math.nan})
    with raises(TypeError):
        elastic.report({"loss": object()})
    rt.close()


def test_report_contains_the_place_and_time_of_its_creation(worker, monkeypatch):
    rt, link = worker
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    elastic.report({"loss": 0.5})
    [said] = link.sent
    assert said == Reported(1, 1, 3, 1, 2, 1.8e9, packed({"loss": 0.5}))
    rt.link_thread.receive(ReportsTaken(1))
    elastic.report({"loss": 0.25})
    assert (link.sent[-1].number, link.sent[-1].oldest) == (2, 2)


def test_report_that_is_too_large_is_refused_and_not_sent(worker):
    _, link = worker
    with raises(Invalid):
        elastic.report({"text": "x" * 70_000})
    assert link.sent == []


def test_unresponsive_driver_delays_no_worker_and_gets_the_newest_reports_later(worker):
    rt, link = worker
    for n in range(5000):
        elastic.report({"n": n})
    under_way = len(link.reports())
    assert 500 < under_way < WINDOW_BYTES // 100
    rt.link_thread.receive(messages.Restate())  # another driver, or another connection
    again = link.reports()[under_way:]
    assert [r.number for r in again] == [*range(1, under_way + 1)]
    while rt.reporting is not None and len(rt.reporting._queue):
        rt.link_thread.receive(ReportsTaken(link.reports()[-1].number))
    rest = link.reports()[2 * under_way :]
    assert len(rest) == 1000 and rest[0].dropped == 5000 - under_way - 1000
    assert rest[-1].metrics == packed({"n": 4999})


def test_the_workers_own_messages_are_sent_before_its_reports(worker):
    rt, link = worker
    elastic.report({})
    link.sent.clear()
    rt.link_thread.receive(messages.Restate())
    assert [type(message).__name__ for message in link.sent] == ["Reconnected", "Reported"]


def test_each_thread_is_in_order_and_no_number_is_missing(worker):
    """Four threads report while the link's takes what they have sent."""
    rt, link = worker
    begin = threading.Barrier(5)

    def report(thread: int) -> None:
        begin.wait(DEADLINE_S)
        for n in range(300):
            elastic.report({"thread": thread, "n": n})

    threads = [threading.Thread(target=report, args=(each,)) for each in range(4)]
    for each in threads:
        each.start()
    begin.wait(DEADLINE_S)
    while any(each.is_alive() for each in threads) or len(link.reports()) < 1200:
        rt.link_thread.receive(ReportsTaken(len(link.reports())))
    for each in threads:
        each.join(DEADLINE_S)
    said = link.reports()
    assert [report.number for report in said] == [*range(1, 1201)]
    metrics = [unpacked(A, report).metrics for report in said]
    for thread in range(4):
        assert [m["n"] for m in metrics if m["thread"] == thread] == [*range(300)]


def test_report_added_while_another_sender_releases_its_lock_is_sent():
    link = Link()
    own = Reporting(link.send)

    class Late:
        """The lock of who sends. Another report comes just before it is given back."""

        lock, came = threading.Lock(), False

        def acquire(self, blocking: bool) -> bool:
            return self.lock.acquire(blocking)

        def release(self) -> None:
            if not self.came:
                self.came = True
                own.add(1, PLACE, b"late")
                assert len(link.sent) == 1, "it is left to the other"
            self.lock.release()

    own._sending = Late()  # type: ignore[assignment]
    own.add(1, PLACE, b"first")
    assert [report.metrics for report in link.sent] == [b"first", b"late"]


def test_broken_link_disables_reporting_silently(worker):
    rt, link = worker
    link.broken = True
    elastic.report({"n": 1})
    link.broken = False
    elastic.report({"n": 2})
    assert link.reports() == [], "there is no other connection"
    rt.close()  # and no thread waits


def test_close_waits_for_acknowledgements_up_to_a_limit(monkeypatch, capsys):
    link = Link()
    own = Reporting(link.send)
    own.add(1, PLACE, b"\x80")
    taken = threading.Timer(0, own.receive, [ReportsTaken(1)])
    taken.start()
    own.close()
    taken.join()
    assert capsys.readouterr().err == ""

    own.add(1, PLACE, b"\x80")
    lost = threading.Timer(0, own.driver_lost)
    lost.start()
    own.close()
    lost.join()
    assert capsys.readouterr().err == ""

    silent = Reporting(link.send)
    silent.add(1, PLACE, b"\x80")
    silent.add(1, PLACE, b"\x80")
    monkeypatch.setattr(reporting, "CLOSE_S", 0.0)
    silent.close()
    recorded("output", capsys.readouterr().err)


# ---- in the driver -------------------------------------------------------------------------------


def said(number: int, oldest: int = 1, *, rank: int = 0, dropped: int = 0, **metrics) -> Reported:
    return Reported(number, oldest, 2, rank, 2, 1.8e9, packed(metrics), dropped)


class Listener:
    """A driver's side with its callback and its log."""

    def __init__(self, reported: Any = None) -> None:
        self.heard: list[Report] = []
        self.log: list[str] = []
        self.sent: list[tuple[Worker, Any]] = []
        self.reports = Reports(
            reported or self.heard.append, lambda level, text: self.log.append(f"{level}: {text}")
        )
        self.reports.serve(self.sent.extend)


async def test_a_report_is_delivered_and_acknowledged():
    s = Listener()
    assert not s.reports.handle(A, messages.Returned(1))
    assert s.reports.handle(A, said(1, loss=0.5)) and s.reports.handle(A, said(1, loss=0.5))
    assert s.heard == [Report(0, 2, 2, str(A), {"loss": 0.5}, 1.8e9)]
    recorded("log", s.log)
    assert s.sent == []
    s.reports._answer()
    assert s.sent == [(A, ReportsTaken(1))]
    s.reports.close()


async def test_a_callback_that_raises_is_logged_once_and_called_again():
    calls = []

    def careless(report: Report) -> None:
        calls.append(report)
        raise ValueError("no such column\nat all")

    s = Listener(careless)
    for n in range(1, 4):
        s.reports.handle(A, said(n))
    assert len(calls) == 3
    [line] = [line for line in s.log if not line.startswith("debug")]
    recorded("messages", line)
    assert "\n" not in line
    recorded("messages", line)
    assert s.reports.by_rank({A: PLACE})[1].metrics == {}, "it is kept all the same"
    s.reports.close()


async def test_an_invalid_report_is_logged_once_for_each_host_and_acknowledged():
    s = Listener()
    for number in (1, 2):
        s.reports.handle(A, Reported(number, 1, 2, 0, 2, 1.8e9, b"\xc1"))
    s.reports.handle(A, said(3, n=3))
    assert [report.metrics for report in s.heard] == [{"n": 3}]
    [line] = [line for line in s.log if line.startswith("warning")]
    recorded("messages", line, A)
    s.reports._answer()
    assert s.sent == [(A, ReportsTaken(3))]
    s.reports.close()


async def test_dropped_reports_are_logged_immediately_and_then_periodically():
    s = Listener()

    def told() -> list[str]:
        return [line for line in s.log if line.startswith("warning")]

    s.reports.handle(A, said(1, dropped=7))
    s.reports._answer()
    [line] = told()
    recorded("messages", line, A)
    s.reports.handle(A, said(2, dropped=1))
    s.reports.handle(B, said(1, dropped=2))
    s.reports._answer()
    assert len(told()) == 1
    s.reports.close()
    recorded("messages", told()[1])


async def test_long_report_is_shortened_to_one_log_line():
    s = Listener()
    s.reports.handle(A, said(1, text="line\n" * 1000))
    [line] = s.log
    assert len(line) < reports_module.SHOWN + 60 and line.endswith("...") and "\n" not in line
    s.reports.close()


def told_story(test):
    """A running job, and the reports of its callback."""

    async def run() -> None:
        heard: list[Report] = []
        async with Story(reported=heard.append) as story:
            await test(story, heard)

    run.__name__ = test.__name__
    return run


@told_story
async def test_reports_are_passed_to_the_callback_without_driver_decisions(s, heard):
    await s.train(A, B)
    s.server.received(A, said(1, step=1))
    s.server.received(B, said(1, rank=1, step=1))
    assert [(r.rank, r.worker) for r in heard] == [(0, str(A)), (1, str(B))], "at once"
    events = s.driver._journal.story(last=100)
    await s.settle()
    assert "eport" not in events and s.driver._journal.story(last=100) == events


@told_story
async def test_last_reports_are_processed_before_the_exit_and_kept_by_rank(s, heard):
    await s.train(A, B)
    s.server.last_words[B] = [said(1, rank=1, step=9), said(2, rank=1, step=10)]
    await s.say(A, said(1, step=9), messages.Returned(1))
    await s.say(B, messages.Returned(1))
    for worker in (A, B):
        s.server.here.discard(worker)
        await s.exit(worker)
    assert await s.code() == 0
    assert [r.metrics["step"] for r in heard] == [9, 9, 10]
    last = s.driver.last_reports()
    assert {rank: report.metrics["step"] for rank, report in last.items()} == {0: 9, 1: 10}


@told_story
async def test_reports_of_a_worker_outside_the_last_world_are_delivered_but_not_kept(s, heard):
    await s.train(A, B)
    await s.say(B, said(1, rank=1, step=1))
    s.server.last_words[B] = [said(2, rank=1, step=2)]
    s.server.here.discard(B)
    await s.exit(B, -9)
    await s.say(A, said(1, step=5))
    assert [r.metrics["step"] for r in heard] == [1, 2, 5]
    assert {r.generation for r in heard} == {2}, "as they were made"
    store = messages.Address("127.0.0.1", 9000)
    await s.say(A, messages.Ready(1, None, store, "d", number=2))
    assert [*s.driver.places] == [A]
    assert [*s.driver.last_reports()] == [0]
    assert [*s.driver._reports._last] == [A], "a job may lose workers for as long as it likes"


def test_report_is_a_public_name_that_needs_no_torch():
    program = (
        "import sys\n"
        "from elastic.monitoring.reporting import Report, report\n"
        "import elastic\n"
        "assert elastic.report is report and elastic.Report is Report\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_launch_refuses_a_callback_that_is_not_callable():
    with raises(Invalid):
        elastic.launch(print, on_report={})  # type: ignore[arg-type]
