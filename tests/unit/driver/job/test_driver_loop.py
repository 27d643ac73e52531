"""Event loop of the driver with the real membership and fakes around it: from observations to events to actions."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any, cast

import msgspec
import pytest

from elastic.driver import events
from elastic.driver.job import shutdown
from elastic.driver.job.driver_loop import Driver, JobRuntime
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.journal.journal import Journal, read, replay
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.worker_messages import EVENTS, event_of
from elastic.driver.monitoring.world_log_lines import (
    JobStart,
    phases_line,
    recovery_line,
    start_line,
    world_line,
)
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.driver.settings import Settings
from elastic.protocol import messages as protocol
from elastic.protocol.messages import Address, Commit, Place, Worker
from harness import wording
from harness.fakes.discovery import FakeDiscovery
from harness.fakes.launcher import FakeLauncher
from harness.golden import recorded

A, B, C = (Worker("localhost", n) for n in range(3))
DEADLINE_S = 60.0


class FakeServer:
    """Records sent messages. ``stderr_tail`` are received when the loop drains a dead worker's connection."""

    secret = b"\1" * 32

    def __init__(self) -> None:
        self.sent: list[tuple[Worker, Any]] = []
        self.here: set[Worker] = set()
        self.last_words: dict[Worker, list[Any]] = {}
        self.received = self.gone = self.expected = cast(Any, None)

    async def open(self, interface, port, *, received, gone, expected) -> Address:
        self.received, self.gone, self.expected = received, gone, expected
        return Address(interface, 4711)

    def send(self, worker, message) -> bool:
        self.sent.append((worker, message))
        return worker in self.here

    def send_each(self, messages) -> None:
        for worker, message in messages:
            self.send(worker, message)

    def send_world(self, world, places) -> None:
        for worker, place in places:
            self.send(worker, msgspec.structs.replace(world, place=place))

    def broadcast(self, workers, message) -> None:
        for worker in workers:
            self.send(worker, message)

    def drain(self, worker) -> None:
        for message in self.last_words.pop(worker, []):
            self.received(worker, message)

    def connected(self, worker) -> bool:
        return worker in self.here

    def disconnect(self, worker) -> None:
        if worker in self.here:
            self.here.discard(worker)
            self.gone(worker, False)

    async def close(self) -> None: ...

    def to(self, worker, kind):
        return [m for w, m in self.sent if w == worker and isinstance(m, kind)]


class Story:
    """A running job, surrounded by fakes."""

    def __init__(
        self,
        np=2,
        slots=None,
        path=None,
        membership=None,
        noted=None,
        reported=None,
        leaves=None,
        journal=None,
        **changes,
    ) -> None:
        self.settings = Settings(
            np=np, workers_min=1, workers_max=np, elastic=True, env={"X": "extra"}, **changes
        )
        self.server, self.launcher = FakeServer(), FakeLauncher()
        self.discovery = FakeDiscovery({"localhost": slots or np})
        self.membership = membership or Membership(self.settings)
        self.log: list[str] = []
        self.driver = Driver(
            JobRuntime(
                settings=self.settings,
                command=["train"],
                environ={"PATH": "/bin"},
                secret=FakeServer.secret.hex(),
            ),
            membership=self.membership,
            server=cast(Any, self.server),
            launcher=self.launcher,
            discovery=self.discovery,
            journal=journal or (FileJournal.begin(path, self.settings) if path else Journal()),
            log=lambda level, text: self.log.append(f"{level}: {text}"),
            noted=noted,
            reported=reported,
            leaves=leaves,
        )

    async def __aenter__(self) -> Story:
        self.run = asyncio.ensure_future(self.driver.run())
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.run.done():
            self.run.cancel()
            await asyncio.gather(self.run, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until everything that was posted has been handled."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def say(self, worker, *messages) -> None:
        for message in messages:
            self.server.received(worker, message)
        await self.settle()

    async def train(self, *workers) -> None:
        """Form the first world."""
        for worker in workers:
            self.server.here.add(worker)
            await self.say(worker, protocol.Hello(worker, 100 + worker.slot))
        for worker in workers:
            store = Address("127.0.0.1", 9000 + worker.slot)
            await self.say(worker, protocol.Layout("d", "w float32 [1]"))
            await self.say(worker, protocol.Ready(0, None, store, "d"))

    async def exit(self, worker, code=0) -> None:
        self.launcher.exit(worker, code)
        await self.settle()

    async def code(self) -> int:
        return await asyncio.wait_for(self.run, DEADLINE_S)


def story(**options):
    """Run an async test with a Story."""

    def decorate(test):
        async def run(tmp_path) -> None:
            path = tmp_path / "journal"
            async with Story(path=path, **options) as running:
                await test(running)
            replay(path)

        run.__name__ = test.__name__
        return run

    return decorate


@story()
async def test_job_runs_from_start_to_success(s):
    assert s.launcher.started == [A, B]
    env = s.launcher.environments[B]
    assert env["ELASTIC_DRIVER"] == "127.0.0.1:4711" and env["ELASTIC_SECRET"] == "01" * 32
    assert env["ELASTIC_WORKER"] == "localhost:1#1" and env["HOROVOD_LOCAL_RANK"] == "1"
    assert env["PATH"] == "/bin" and env["X"] == "extra"
    assert s.server.expected(A) and not s.server.expected(A.next())
    recorded("log", s.log)

    await s.train(A, B)
    [world] = s.server.to(B, protocol.World)
    assert (world.generation, world.place.rank, world.place.size) == (1, 1, 2)
    assert world.store == Address("127.0.0.1", 9000)
    recorded("log", s.log)

    await s.say(A, protocol.Returned(1))
    await s.say(B, protocol.Returned(1))
    assert s.server.to(A, protocol.Finish)
    await s.say(B, protocol.SendResult(b"from 1"))
    await s.say(A, protocol.SendResult(b"from 0"))
    for worker in (A, B):
        s.server.here.discard(worker)
        await s.exit(worker)
    assert await s.code() == 0
    assert s.driver.ordered_results() == [b"from 0", b"from 1"]
    assert s.launcher.closed and not s.launcher.killed


async def test_queued_reports_of_workers_when_handled_then_only_the_last_leads_to_decisions(
    tmp_path,
):
    path = tmp_path / "journal"
    async with Story(path=path, np=3) as s:
        await s.train(A, B, C)
        for worker in (A, B, C):  # without waiting in between
            s.server.received(worker, protocol.Returned(1))
            s.server.received(worker, protocol.Resumed(1, {}))
        await s.settle()
    _, entries = read(path)
    resumed = [entry.more for entry in entries if isinstance(entry.event, events.WorkerResumed)]
    returned = [entry.more for entry in entries if isinstance(entry.event, events.WorkerReturned)]
    assert (resumed, returned) == ([True, True, False], [False, False, False])
    replay(path)


@story(np=4, slots=2)
async def test_first_world_with_fewer_workers_than_wanted_is_logged(s):
    await s.train(A, B)
    wanted = because(ReasonKind.FIRST_WORLD, members=2, wanted=4, slots=2)
    recorded("log", s.log, wanted)
    assert str(wanted) != str(because(ReasonKind.FIRST_WORLD, members=2))


@pytest.mark.parametrize(
    ("worlds", "until", "parts"),
    [
        ((81.0, 86.1), 87.8, [71.0, 5.1, 1.7]),
        ((81.0,), 87.8, [71.0, 6.8]),
        ((11.0, 12.0), 12.1, []),
        ((11.0, 12.0, 71.0), 71.1, [1.0, 60.0]),
    ],
    ids=["elastic", "fixed size", "short", "interrupted"],
)
def test_start_of_training_when_long_then_the_line_has_its_parts(worlds, until, parts):
    start = JobStart(10.0)
    for at in worlds:
        start.published(at)
    report = events.ReportRecovery(2, "start", as_sentence(""), 2, 1652.0, {}, 0)
    line = start_line(report, start, until)
    assert sum(took for _, took in start.parts(until)) == pytest.approx(until - 10.0)
    durations = [float(each) for each in re.findall(r"([\d.]+) s\b", line)]
    assert durations == [pytest.approx(each, abs=0.5) for each in (until - 10.0, *parts)]
    assert len(line) <= 100
    recorded("messages", line)


@story()
async def test_training_when_started_then_one_line_has_the_time_since_the_start_of_the_job(s):
    await s.train(A, B)
    for worker in (A, B):
        await s.say(worker, protocol.Resumed(1, {"formed": 1652.0}))
    started = [line for line in s.log if "started" in line]
    assert len(started) == 1 and "1652" not in started[0]
    recorded("log", re.sub(r"\d+\.\d s", "N s", started[0]))


@story()
async def test_scale_when_accepted_then_is_done_once_the_new_world_trains(s):
    await s.train(A, B)
    for worker in (A, B):
        await s.say(worker, protocol.Resumed(1, {}))
    s.driver.handle_request(events.ScaleRequested(1, 1))
    await s.settle()
    for worker in (A, B):
        await s.say(worker, protocol.Checked(1, 1, 5))
    for worker in (A, B):
        store = Address("127.0.0.1", 9000 + worker.slot)
        await s.say(worker, protocol.Ready(1, Commit(1, 3), store, "d"))
    accepted = [line for line in s.log if "accepted" in line]
    assert len(accepted) == 1 and not any("done" in line for line in s.log)
    await s.say(A, protocol.Resumed(2, {}))
    [done] = [line for line in s.log if "done" in line]
    assert s.log.index(accepted[0]) < s.log.index(done) and "scale 1" in done


@story()
async def test_exit_when_a_related_line_follows_then_is_logged_first(s):
    cools = because(ReasonKind.SLOT_COOLS, worker="localhost:1#1", exit="exit code 1", wait_s=1.0)
    s.driver._perform([events.Report("warning", str(cools), cools)])
    assert not any(str(cools) in line for line in s.log), "it waits for more of its kind"
    s.driver._perform([events.Report("debug", "unrelated")])
    assert not any(str(cools) in line for line in s.log)
    s.driver._perform([events.Report("warning", "waiting for 1 more worker")])
    assert s.log[-2:] == [f"warning: {cools}", "warning: waiting for 1 more worker"]


@story()
async def test_last_messages_are_handled_before_the_exit(s):
    await s.train(A, B)
    s.server.last_words[B] = [protocol.Raised(1, None, "ValueError: x", "Traceback ...")]
    s.launcher.exit(B, 1)
    await s.settle()
    assert any("raised ValueError: x" in line for line in s.log)
    [broken] = s.server.to(A, protocol.Broken)
    assert broken.generation == 1


@story()
async def test_clean_exit_waits_for_messages_in_flight(s):
    await s.train(A, B)
    await s.say(A, protocol.Returned(1))
    await s.say(B, protocol.Returned(1))
    await s.exit(A)
    s.server.here.discard(B)
    await s.exit(B)
    assert not s.run.done()  # A's connection has not ended
    s.server.received(A, protocol.SendResult(b"large"))
    s.server.here.discard(A)
    s.server.gone(A, False)
    assert await s.code() == 0
    assert s.driver.results == {A: b"large"}


@story()
async def test_results_without_a_world_are_ordered_by_the_initial_places(s):
    await s.say(B, protocol.SendResult(b"from 1"))
    await s.say(A, protocol.SendResult(b"from 0"))
    await s.exit(B)
    await s.exit(A)
    assert await s.code() == 0
    assert s.driver.ordered_results() == [b"from 0", b"from 1"]


@story()
async def test_worker_when_exited_without_init_and_result_then_its_result_is_missing(s):
    await s.say(B, protocol.SendResult(b"from 1"))
    await s.exit(B)
    await s.exit(A)  # by sys.exit(0)
    assert await s.code() == 0
    assert s.driver.ordered_results() == [None, b"from 1"]


@story()
async def test_exited_workers_leave_no_state(s):
    place = s.driver._promised[A]

    async def come_and_go(worker: Worker) -> None:
        for _ in range(5):
            worker = worker.next()
            s.driver._perform([events.StartWorker(worker, place, as_sentence("again"))])
            await s.exit(worker, 1)

    await come_and_go(C)
    assert s.driver._promised.keys() == {A, B}
    await s.train(A, B)
    await come_and_go(C)
    assert not s.driver._promised, "a world has places of its own"


@story()
async def test_members_are_notified_before_workers_are_started(s):
    await s.train(A, B)
    performed: list[str] = []
    start = s.launcher.start

    def send(worker, message) -> bool:
        performed.append(type(message).__name__)
        return True

    def starts(worker, command, env) -> None:
        performed.append("start")
        start(worker, command, env)

    s.server.send, s.launcher.start = send, starts
    place = s.driver.places[A]
    s.driver._perform(
        [
            events.StartWorker(C, place, as_sentence("x")),
            events.BreakWorld(1, [A], as_sentence("lost")),
        ]
    )
    assert performed == ["Broken", "start"]
    s.launcher.exit(C, 0)


@story()
async def test_observations_of_processes_become_events(s):
    await s.train(A, B)
    s.driver._perform(
        [
            events.ProbeWorkers([A, B]),
            events.DumpStacks(B, because(ReasonKind.IDLE, for_s=30.0, where="for the end")),
        ]
    )
    assert s.launcher.probed == [A, B] and s.launcher.dumped == [B]
    recorded("log", s.log[-1])
    s.launcher.noticed(events.WorkerFrozen(B, "stopped by a signal"))
    await s.settle()
    assert s.launcher.killed == [B]
    recorded("log", s.log)


@story()
async def test_unreachable_worker_is_killed_at_once(s):
    await s.train(A, B)
    s.server.here.discard(B)
    s.server.gone(B, True)
    await s.settle()
    assert s.launcher.killed == [B]


@story()
async def test_worker_receives_its_time_limit_for_waits(s):
    env = s.launcher.environments[A]
    # Twice --elastic-timeout, --start-timeout, one minute.
    assert env["ELASTIC_WAIT_TIMEOUT"] == "1380"


@story()
async def test_members_are_notified_of_a_new_list_of_hosts(s):
    def notified() -> list[Worker]:
        return [who for who, message in s.server.sent if message == protocol.HostsListed()]

    await s.train(A, B)
    assert notified() == []  # the first list causes no notification
    s.discovery.push({"localhost": 2, "other": 1})
    await s.settle()
    assert sorted(notified()) == [A, B]
    s.discovery.push({"localhost": 2, "other": 1})
    await s.settle()
    assert len(notified()) == 2


async def test_journal_entries_are_passed_to_observers(tmp_path):
    noted: list[str] = []

    @story(noted=lambda event, actions, now: noted.append(type(event).__name__))
    async def talk(s):
        await s.train(A, B)

    await talk(tmp_path)
    assert noted[0] == "HostsChanged" and noted.count("WorkerReady") == 2


@story()
async def test_exit_code_after_success_is_kept(s):
    await s.train(A, B)
    for worker in (A, B):
        await s.say(worker, protocol.Returned(1))
        s.server.here.discard(worker)
    await s.exit(A)
    await s.exit(B, 3)
    assert await s.code() == 1
    text = "rank 1 (localhost:1#1 on localhost) ended with exit code 3 in code that runs after it"
    assert any(text in x for x in s.log)


async def is_stopped(s) -> None:
    await s.train(A, B)
    s.driver.handle_request(events.StopRequested("rank 0 ended"))
    await s.settle()
    for worker in (A, B):
        await s.exit(worker, 1)


@story()
async def test_signal_during_close_is_kept(s):
    async def close() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while s.driver._stop_code is None:
            await asyncio.sleep(0)

    s.server.close = close
    await is_stopped(s)
    assert await s.code() == 130


@story()
async def test_signal_after_the_last_turn_of_the_loop_is_kept(s):
    close = s.driver._journal.close

    # The last action of the driver, after which the loop runs no more.
    def closed() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close()

    s.driver._journal.close = closed
    await is_stopped(s)
    assert await s.code() == 130


@story()
async def test_output_of_a_worker_is_not_the_last_line(s):
    await s.train(A, B)
    wrote = "Traceback\nKeyError: 'x'\n"
    ended = because(
        ReasonKind.ENDED, who="rank 0", exit="exit code 1", killed_for=None, wrote=wrote
    )
    assert s.driver._end(events.EndJob(1, ended)) is None, "it is said when no worker is left"
    _, last = s.driver._last_line
    recorded("log", last)
    s.driver.handle_request(events.StopRequested("rank 0 ended"))
    for worker in (A, B):
        await s.exit(worker, 1)
    assert await s.code() == 1


@story()
async def test_worker_with_another_state_receives_the_differences(s):
    await s.train(A, B)
    await s.say(B, protocol.Layout("e", "w float32 [2]"))
    s.driver._perform([events.RejectWorker(B, "e", "d")])
    [rejected] = s.server.to(B, protocol.Rejected)
    recorded("messages", rejected.reason)


@story()
async def test_joining_worker_receives_the_batch_structure_of_the_members(s):
    await s.train(A, B)
    await s.say(A, protocol.StepInput(b"float32 [16, 4]"))
    for worker, newcomer in ((A, False), (B, True)):
        s.driver._perform([events.WelcomeWorker(worker, Place(1, 2, 1, 2, 0, 1), newcomer, True)])
    assert [w.step_input for w in s.server.to(A, protocol.Welcome)] == [b"", b"float32 [16, 4]"]
    assert s.server.to(B, protocol.Welcome)[-1].step_input == b"float32 [16, 4]"


@story()
async def test_stop_notifies_all_workers_then_kills(s):
    await s.train(A, B)
    s.driver.stop("enough", 143)
    await s.settle()
    assert s.server.to(A, protocol.End) and s.server.to(B, protocol.End)
    assert not s.launcher.killed
    s.driver.stop("now", 143)
    await s.settle()
    assert s.launcher.killed == [A, B]
    assert await s.code() == 143


async def test_second_stop_does_not_wait_for_an_unresponsive_store():
    class StoreJournal(Journal):
        """Journal in a store that answers until told not to."""

        def __init__(self) -> None:
            super().__init__()
            self.answers = asyncio.Event()
            self.answers.set()

        async def settle(self) -> None:
            await self.answers.wait()

    journal = StoreJournal()
    async with Story(journal=journal) as s:
        await s.train(A, B)
        journal.answers.clear()
        s.driver.stop("enough", 130)
        await s.settle()
        assert not s.server.to(A, protocol.End), "what is decided has to be in the journal first"
        s.driver.stop("now", 130)
        await s.settle()
        assert s.launcher.killed == [A, B]
        assert await s.code() == 130


@story()
async def test_stop_while_workers_exit_on_their_own_keeps_its_exit_code(s):
    await s.train(A, B)
    for worker in (A, B):
        await s.say(worker, protocol.Returned(1))
        s.server.here.discard(worker)
    await s.exit(A)
    s.driver.stop("enough", 130)
    await s.settle()
    assert s.server.to(B, protocol.End)
    await s.exit(B, -15)
    assert await s.code() == 130


async def test_grace_period_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(shutdown, "GRACE_S", 0.02)

    @story()
    async def talk(s):
        await s.train(A, B)
        s.driver.stop("enough")
        assert await s.code() == 1
        assert s.launcher.killed == [A, B]

    await talk(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
async def test_signals_stop_the_job_and_their_handlers_are_restored(number, code, tmp_path):
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        pytest.skip("it is ignored here, as under nohup, and stays so")

    @story()
    async def talk(s):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(until(lambda: s.server.to(A, protocol.End)), DEADLINE_S)
        os.kill(os.getpid(), number)
        assert await s.code() == code

    await talk(tmp_path)
    assert signal.getsignal(number) is before


async def test_two_sigterms_within_one_call_of_the_handler_are_one_request(tmp_path, monkeypatch):
    handled: list[events.Event] = []

    @story(noted=lambda event, actions, at: handled.append(event))
    async def talk(s):
        await s.train(A, B)
        loop, handler = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        now = loop.time

        def interrupted() -> float:
            monkeypatch.setattr(loop, "time", now)
            signal.raise_signal(signal.SIGTERM)
            return now()

        monkeypatch.setattr(loop, "time", interrupted)
        handler(signal.SIGTERM, None)
        await s.settle()
        assert [
            event.checkpoint_s > 0 for event in handled if isinstance(event, events.StopRequested)
        ] == [True]
        await s.exit(A)
        await s.exit(B)
        assert await s.code() == 143

    await talk(tmp_path)


async def test_sigterm_may_end_only_the_driver(tmp_path):
    reasons: list[str] = []

    @story(leaves=lambda: reasons.append("leaves"))
    async def talk(s):
        await s.train(A, B)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(until(lambda: reasons), DEADLINE_S)
        await s.settle()
        assert not s.server.to(A, protocol.End) and not s.run.done()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(until(lambda: s.server.to(A, protocol.End)), DEADLINE_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert await s.code() == 130

    await talk(tmp_path)


async def until(true) -> None:
    while not true():
        await asyncio.sleep(0)


@story()
async def test_missing_program_ends_the_job_with_a_reason(s):
    assert s.launcher.alive() == {A, B}
    for worker in (A, B):
        s.launcher.exit(worker, 127, reason="there is no program 'train'")
    await s.settle()
    assert await s.code() == 1
    recorded("messages", s.driver.outcome)


async def test_discovery_without_hosts_ends_the_job(tmp_path):
    running = Story(path=tmp_path / "j")
    running.driver._discovery = FakeDiscovery()
    running.driver._discovery.close()
    async with running:
        assert await running.code() == 1
    recorded("messages", running.driver.outcome)


async def test_bug_ends_the_job_with_its_history(tmp_path):
    class Buggy(Membership):
        def handle(self, event, now, *, more=False):
            if isinstance(event, events.WorkerExited):
                raise AssertionError("never thought of this")
            return super().handle(event, now, more=more)

    settings = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
    async with Story(path=tmp_path / "j", membership=Buggy(settings)) as s:
        await s.exit(A, 1)
        assert s.server.to(B, protocol.End)
        await s.exit(B, 0)
        assert await s.code() == 1
        [line] = [x for x in s.log if wording.BUG_DRIVER in x and "latest events" in x]
        assert "HostsChanged" in line
        recorded("messages", line)
    replay(tmp_path / "j", Buggy)


async def test_stop_before_the_start_is_remembered(tmp_path):
    running = Story(path=tmp_path / "j")
    running.driver.stop("changed my mind", 130)
    async with running:
        assert await running.code() == 130
    assert running.launcher.started == []


def test_every_message_has_the_fields_of_its_event():
    for message, event in EVENTS.items():
        assert event.__struct_fields__ == ("worker", *message.__struct_fields__)
    assert event_of(A, protocol.Hello(A, 7, "2.9")) == events.WorkerConnected(A, 7, "2.9")
    assert event_of(A, protocol.Checked(1, 2, 3)) == events.WorkerChecked(A, 1, 2, 3)


def test_new_world_does_not_repeat_the_cause_just_logged():
    lost = as_sentence("lost localhost:2#1 (signal 9 SIGKILL)")
    why = because(ReasonKind.NEXT_WORLD, cause=lost, ready=3, members=4, new=1)
    members = [events.Member(A, Place(0, 1, 0, 1, 0, 1))]
    world = events.PublishWorld(3, members, Address("h", 1), 1, None, why)
    again = world_line(world, before=f"generation 2 is over: {lost}", wanted=4, slots=4)
    assert str(lost) not in again and len(again) <= 79
    assert str(lost) in world_line(world, before="something else", wanted=4, slots=4)


def test_recovery_is_one_line_without_its_phases():
    report = events.ReportRecovery(
        generation=5,
        kind="recovery",
        reason=as_sentence("lost localhost:2#1 (signal 9 SIGKILL)"),
        size=3,
        total_ms=83.4,
        phases_ms={"gathered": 9.2, "formed": 41.0, "copied": 0.25},
        copied_bytes=12_300_000,
    )
    lines = {held: recovery_line(report, held=held) for held in (None, True, False)}
    stored = msgspec.structs.replace(report, from_checkpoint=True)
    others = [recovery_line(stored, held=True), recovery_line(report, held=True, committed=False)]
    assert len({*lines.values(), *others}) == 5
    for line in (*lines.values(), *others):
        recorded("messages", line)
        assert "gathered" not in line and len(line) <= 100
    assert "gathered 9, formed 41, copied 0.2" in phases_line(report)
    recorded("messages", recovery_line(msgspec.structs.replace(report, kind="change"), held=True))
