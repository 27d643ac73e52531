"""Timelines: notifications of workers, their end, and the contents of the file. Real files, no network."""

from __future__ import annotations

import asyncio
import json

import pytest

from elastic.driver.monitoring import timeline_collection
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.timeline_collection import Tracing
from elastic.errors import Invalid
from elastic.monitoring import timeline
from elastic.monitoring.timeline_transfer import TracingThroughDriver, TracingToFile
from elastic.protocol import messages
from elastic.protocol.messages import Place, Worker
from elastic.protocol.trace_file import TraceFile
from elastic.rendezvous import worker_settings
from harness.golden import raises, recorded

A, B = Worker("h", 0), Worker("h", 1)
DEADLINE_S = 60.0


class Talk:
    """Records the messages to workers."""

    def __init__(self, folder) -> None:
        self.path = folder / "t.json"
        self.log: list[str] = []
        self.told: list = []
        self.news = asyncio.Event()
        self.tracing = Tracing(lambda level, text: self.log.append(f"{level}: {text}"), JobView())
        self.tracing.serve(self.tell)

    def tell(self, worker, message) -> None:
        self.told.append((worker, message))
        self.news.set()

    def hello(self, *workers) -> None:
        for worker in workers:
            # other components receive it too
            assert not self.tracing.handle(worker, messages.Hello(worker, 1))

    def hear(self, worker, message) -> None:
        assert self.tracing.handle(worker, message)

    def trace(self, worker, name, number=1) -> None:
        record = ("X", "w", name, 1, 1)
        self.hear(worker, messages.Traced(number, 0, [record]))

    async def until_told(self, worker, message) -> None:
        while (worker, message) not in self.told:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), DEADLINE_S)

    def names(self) -> list[str]:
        return [e["name"] for e in json.loads(self.path.read_text()) if e["ph"] == "X"]


def talk(test):
    """Run an async test with a Talk."""

    async def run(tmp_path) -> None:
        talk = Talk(tmp_path)
        await test(talk)
        await talk.tracing.close()

    run.__name__ = test.__name__
    return run


@talk
async def test_all_workers_record_and_written_records_are_confirmed(t):
    t.hello(A)
    t.tracing.open(str(t.path), mark_cycles=True)
    t.hello(B)  # a newcomer
    on = messages.Tracing(1, True, True)
    assert t.told == [(A, on), (B, on)]
    t.trace(A, "first")
    await t.until_told(A, messages.TracesTaken(1))
    assert t.names() == ["first"]
    t.trace(B, "second")
    await t.tracing.close()
    assert t.names() == ["first", "second"]


@talk
async def test_time_is_sent_to_workers(t):
    t.hear(A, messages.ClockAsked(7))
    [(_, answer)] = t.told
    assert answer.asked_ns == 7 and 0 < answer.heard_ns <= answer.told_ns


@talk
async def test_script_starts_and_stops_a_timeline(t):
    t.hello(A, B)
    t.hear(A, messages.TimelineWanted(1, str(t.path), False))
    assert (A, messages.TimelineAnswer(1, 1, str(t.path))) in t.told
    # The others make the same request, or one that only they want.
    t.hear(B, messages.TimelineWanted(1, str(t.path) + "x", False))
    assert (B, messages.TimelineAnswer(1, 1, str(t.path))) in t.told
    recorded("log", t.log[-1])
    t.trace(A, "recorded")
    t.hear(A, messages.TimelineUnwanted(2, 1))
    off = messages.Tracing(1, False)
    assert (A, off) in t.told and (B, off) in t.told
    t.hear(A, messages.TracedAll(1))
    t.trace(B, "the rest")
    t.hear(B, messages.TracedAll(1))
    await t.until_told(A, messages.TimelineAnswer(2, 1))
    recorded("messages", t.names())
    t.hear(B, messages.TimelineUnwanted(2, 1))  # B wanted it to end, and it has ended
    assert (B, messages.TimelineAnswer(2, 1)) in t.told


@talk
async def test_second_timeline_waits_for_the_first_and_ignores_a_late_stop(t):
    t.hello(A, B)
    t.hear(A, messages.TimelineWanted(1, str(t.path), False))
    t.hear(A, messages.TimelineUnwanted(2, 1))
    t.hear(A, messages.TracedAll(1))
    again = t.path.with_name("again.json")
    t.hear(A, messages.TimelineWanted(3, str(again), False))
    assert not again.exists()
    t.hear(B, messages.TracedAll(1))
    await t.until_told(A, messages.TimelineAnswer(3, 2, str(again)))
    t.hear(B, messages.TimelineUnwanted(1, 1))
    assert (B, messages.Tracing(2, False)) not in t.told
    await t.tracing.close()
    assert json.loads(again.read_text())[0]["ph"] == "M"  # the file is complete, with its header


@talk
async def test_stop_is_answered_only_when_the_timeline_file_is_complete(t):
    t.hello(A, B)
    t.hear(A, messages.TimelineWanted(1, str(t.path), False))
    t.hear(A, messages.TimelineUnwanted(2, 1))
    t.trace(A, "last")
    t.hear(A, messages.TracedAll(1))
    t.hear(B, messages.TracedAll(1))  # the file is being written from now on
    t.hear(B, messages.TimelineUnwanted(1, 1))
    answer = (B, messages.TimelineAnswer(1, 1))
    assert answer not in t.told
    await t.until_told(*answer)
    assert t.names() == ["last"]


@talk
async def test_exited_worker_is_not_awaited(t):
    t.hello(A, B)
    t.tracing.open(str(t.path))
    t.hear(A, messages.TimelineUnwanted(1, 1))
    t.hear(A, messages.TracedAll(1))
    assert t.told[-1][0] in (A, B) and not isinstance(t.told[-1][1], messages.TimelineAnswer)
    t.tracing.gone(B)
    await t.until_told(A, messages.TimelineAnswer(1, 1))


@talk
async def test_invalid_path_is_rejected_with_a_reason(t):
    t.hear(A, messages.TimelineWanted(1, "/no/such/folder/t.json", False))
    t.hear(A, messages.TimelineWanted(2, "t.json", False))
    first, second = (message for _, message in t.told)
    assert first.timeline == 0
    recorded("messages", first.error)
    recorded("messages", second.error)
    with raises(Invalid):
        t.tracing.open(str(t.path.parent))


@talk
async def test_records_of_an_ended_timeline_are_ignored(t):
    t.trace(A, "too early")
    t.tracing.open(str(t.path))
    t.trace(A, "of another", number=7)
    await t.tracing.close()
    assert t.names() == [] and not t.told


async def test_full_disk_ends_the_timeline_but_not_the_job(tmp_path, monkeypatch):
    @talk
    async def go(t):
        t.hello(A)
        t.tracing.open(str(t.path))
        t.trace(A, "first")
        await t.until_told(A, messages.TracesTaken(1))

        def full(self, events):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(TraceFile, "append", full)
        t.trace(A, "second")
        await t.until_told(A, messages.Tracing(1, False))
        assert t.names() == ["first"]
        recorded("log", t.log)
        t.trace(A, "third")

    await go(tmp_path)


async def test_overloaded_driver_drops_records_and_reports_their_number(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_collection, "WAITING_LIMIT", 0)

    @talk
    async def go(t):
        t.tracing.open(str(t.path))
        for name in ("first", "second", "third"):
            t.trace(A, name)
        await t.tracing.close()
        assert t.names() == ["first"]
        events = json.loads(t.path.read_text())
        assert [e["args"]["count"] for e in events if e["ph"] == "i"] == [1, 1]

    await go(tmp_path)


# ---- without a driver ------------------------------------------------------------------------------------------------


def own(rank, **variables):
    tracing = TracingToFile(worker_settings.read(variables))
    tracing.begin(Place(rank, 2, rank, 2, 0, 1))
    return tracing


def test_each_rank_writes_its_own_file_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        tracing = own(rank, HOROVOD_TIMELINE="t.json", HOROVOD_TIMELINE_MARK_CYCLES="1")
        timeline.begin("allreduce.w", "ALLREDUCE")
        timeline.cycle()
        timeline.begin("allreduce.w", "QUEUE")  # never ended
        tracing.close()
        assert not timeline.on
    for rank, name in enumerate(["t.json", "t.json.rank1"]):
        events = json.loads((tmp_path / name).read_text())
        assert events[1]["args"] == {"name": f"rank {rank}"}
        shown = [event["name"] for event in events if event["ph"] != "M"]
        assert shown == ["CYCLE_START", "QUEUE", "ALLREDUCE"]


def test_script_may_start_a_timeline_without_a_driver(tmp_path):
    tracing = own(0, HOROVOD_TIMELINE="DYNAMIC")
    assert not timeline.on
    tracing.stop()  # no effect
    tracing.start(str(tmp_path / "a.json"), False)
    tracing.start(str(tmp_path / "a.json"), False)  # no effect: it exists
    with raises(Invalid):
        tracing.start(str(tmp_path / "b.json"), False)
    timeline.tick("w", 3)
    tracing.stop()
    assert '"3"' in (tmp_path / "a.json").read_text()
    tracing.start(str(tmp_path / "b.json"), False)
    tracing.close()
    assert json.loads((tmp_path / "b.json").read_text())


def test_invalid_path_fails_init_without_a_driver():
    with raises(Invalid):
        own(0, HOROVOD_TIMELINE="/no/such/folder/t.json")
    assert not timeline.on


# ---- requested by the script before init() -------------------------------------------------------


@pytest.fixture
def asking(monkeypatch):
    """The worker's side with a timeline in its environment, its messages, and the driver's answers."""
    sent: list = []
    errors = [""]

    def answer(message) -> None:
        sent.append(message)
        if not isinstance(message, messages.TimelineWanted):
            return
        made.receive(messages.TimelineAnswer(message.request, 1, message.path, errors[0]))

    env = worker_settings.read({"HOROVOD_TIMELINE": "/t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    made = TracingThroughDriver(env, answer, lambda: None)
    yield made, sent, errors
    timeline.stop()


def test_timeline_of_the_script_is_requested_by_rank_0(asking):
    made, sent, _ = asking
    made.begin(Place(1, 2, 1, 2, 0, 1))
    assert sent == []
    made.begin(Place(0, 2, 0, 2, 0, 1))
    assert sent == [messages.TimelineWanted(1, "/t.json", True)]


def test_timeline_of_the_job_is_not_requested_again(asking):
    made, sent, _ = asking
    made.receive(messages.Tracing(1, True))
    made.begin(Place(0, 2, 0, 2, 0, 1))
    assert not any(isinstance(message, messages.TimelineWanted) for message in sent)


def test_unwritable_timeline_is_reported_with_its_variable(asking):
    made, _, errors = asking
    errors[0] = "no room"
    with raises(Invalid):
        made.begin(Place(0, 2, 0, 2, 0, 1))
