"""Reactions of a worker's link thread to the driver's messages, and its own reports of time."""

from __future__ import annotations

import dataclasses
from unittest.mock import create_autospec

import pytest

from elastic.monitoring.timeline_transfer import TraceSession
from elastic.protocol import messages
from elastic.protocol.messages import Address, Commit, Place, StandBy, TimeSpent, World
from elastic.rendezvous import worker_settings
from elastic.runtime import link_thread
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.link_thread import FIRST_SPENT_S, SPENT_S, LinkThread
from elastic.runtime.recovery import Phase, Recovery
from elastic.runtime.session import Session
from elastic.runtime.training_reports import Training
from elastic.runtime.world_entry import DriverWorlds

STORE = Address("127.0.0.1", 7000)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("wanted", [False, True])
def test_sigterm_in_a_job_of_a_fixed_size_ends_the_worker_unless_a_checkpoint_is_wanted(
    monkeypatch, wanted
):
    clock, ended = Clock(), []
    monkeypatch.setattr(link_thread, "time", clock)
    monkeypatch.setattr(link_thread, "_die_of_sigterm", lambda: ended.append(clock.now))
    worker = Worker(clock, monkeypatch, elastic=False)
    worker.waits()
    worker.world(2)
    worker.thread._sigterm()
    worker.thread.poked()
    assert not ended
    if wanted:
        worker.thread.receive(messages.CheckpointSoon(2))
    clock.now += link_thread.STAY_S
    worker.thread.poked()
    assert ended == ([] if wanted else [clock.now])


class Worker:
    """A worker whose messages to the driver are recorded."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch, elastic: bool = True) -> None:
        env = dataclasses.replace(worker_settings.read({}), elastic=elastic)
        self.clock = clock
        self.session = Session(env, None)
        self.said: list[messages.Message] = []
        monkeypatch.setattr(self.session, "send", self.said.append)
        tracing = create_autospec(TraceSession, instance=True)
        tracing.receive.return_value = False
        worlds = DriverWorlds(self.session)
        self.progress = ProgressCounter()
        self.thread = LinkThread(self.session, worlds, self.progress, tracing, None)

    def waits(self) -> None:
        """In elastic.run, for a world."""
        self.session.recovery.enter()
        self.session.update(lambda recovery: recovery.wait_for_world(STORE, "x"))
        self.session.phases.mark("ready", self.clock.now)

    def world(self, generation: int, rank: int = 0) -> None:
        place = Place(rank, 2, rank, 2, 0, 1)
        self.thread.receive(World(generation, place, STORE, 0, None, "because"))

    def passes(self, seconds: float) -> list[TimeSpent]:
        """Return its reports of time after that."""
        self.clock.now += seconds
        self.said.clear()
        self.thread.poked()
        return [message for message in self.said if isinstance(message, TimeSpent)]


@pytest.fixture
def worker(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(link_thread, "time", clock)
    return Worker(clock, monkeypatch)


def test_next_check_is_due_when_a_wait_is_one_second_old(worker):
    assert worker.thread.poked() == 1.0
    worker.progress.enter(1, "allreduce.loss", worker.clock.now)
    worker.clock.now += 0.4
    assert worker.thread.poked() == pytest.approx(0.6)


def test_a_standby_is_idle_until_there_is_a_place(worker):
    worker.waits()
    assert worker.session.account.part == "joining"
    worker.thread.receive(StandBy())
    assert worker.session.account.part == "idle"
    worker.world(3)
    assert worker.session.account.part == "joining"


def test_standby_time_is_not_counted_as_waited(worker):
    worker.waits()
    worker.thread.receive(StandBy())
    worker.clock.now += 7200.0
    worker.world(3)
    worker.session.phases.mark("synced", worker.clock.now)
    report = worker.session.phases.stepped(3, worker.clock.now)
    assert report is not None
    assert report[0]["waited"] == 0.0


def test_new_member_reports_its_time_account_when_training_begins(worker):
    worker.waits()
    assert worker.passes(1.0) == []
    worker.world(3)
    assert worker.passes(1.0) == []  # the state is being copied
    worker.session.account.begin("training", worker.clock.now)
    [said] = worker.passes(1.0)
    assert (said.generation, said.doing) == (3, "training")
    assert worker.passes(1.0) == []


def test_located_worker_reports_its_line(worker):
    worker.thread.receive(messages.Locate())
    [said] = worker.said
    assert isinstance(said, messages.Located)
    assert (said.generation, said.line.partition(":")[0]) == (0, "test_link_thread.py")


def test_unchanged_values_are_repeated_periodically(worker):
    assert worker.passes(SPENT_S - 1.0) == []
    assert len(worker.passes(1.0)) == 1
    assert worker.passes(SPENT_S - 1.0) == []


@pytest.mark.parametrize(("rank", "every_s"), [(0, FIRST_SPENT_S), (1, SPENT_S)])
def test_rank_0_reports_the_progress_more_often(worker, rank, every_s):
    worker.waits()
    worker.world(3, rank)
    worker.session.account.begin("training", worker.clock.now)
    worker.session.recovery.newest = Commit(3, 7)
    worker.session.recovery.phase = Phase.TRAINING
    worker.passes(1.0)
    assert worker.passes(every_s - 1.0) == []
    [said] = worker.passes(1.0)
    assert said.commit == Commit(3, 7)


def test_last_commit_is_reported_when_the_world_finishes(worker):
    worker.waits()
    worker.world(3)
    worker.session.recovery.newest = Commit(3, 9)
    worker.session.update(Recovery.returned)
    worker.said.clear()
    worker.thread.receive(messages.Finish(3))
    assert worker.session.recovery.phase is Phase.FINISHED
    assert [said.commit for said in worker.said] == [Commit(3, 9)]


def test_second_training_is_reported_when_it_begins(worker):
    worker.waits()
    worker.world(3, rank=1)
    worker.session.account.begin("training", worker.clock.now)
    assert len(worker.passes(1.0)) == 1
    worker.session.recovery.phase = Phase.FINISHED
    worker.session.account.begin("idle", worker.clock.now)
    assert worker.passes(1.0) == []
    with Training(worker.session, worker.progress).again():
        [said] = worker.passes(1.0)
        assert said.doing == "training"
        assert worker.passes(1.0) == []
