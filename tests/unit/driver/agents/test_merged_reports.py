"""Merging of the reports of a host's workers: what is held, for how long, and what the driver receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import pytest

from elastic.chaos.simulator.simulator import Simulation
from elastic.driver import events
from elastic.driver.agents.merged_reports import HOLD_S, ReportMerger
from elastic.driver.agents.messages import Heard, HeardTogether, from_agent
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.records.roster import WorkerStage
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.settings import Settings
from elastic.protocol import messages
from elastic.protocol.messages import (
    Address,
    Broken,
    Commit,
    Place,
    Proceed,
    Ready,
    Resumed,
    ShardsHeld,
    StopAt,
    Worker,
    World,
    encoded,
)
from harness.conversation import exited, has, hosts, running, started, the

A, B, C = (Worker("h", slot) for slot in range(3))
MERGING = (2, 3, 6, 7)  # seeds whose agents merge reports


def world(generation: int) -> World:
    return World(generation, Place(0, 3, 0, 3, 0, 1), Address("h", 1), 0, None, "")


def ready(worker: Worker, number: int = 3, **fields: object) -> Ready:
    store = Address("10.0.0.1", 29500 + worker.slot)
    return msgspec.structs.replace(Ready(2, Commit(2, 5), store, "x", number=number), **fields)


def resumed(worker: Worker, generation: int = 2, copied: int = 0) -> Resumed:
    return Resumed(generation, {"told": 1.5, "group": 20.0 + worker.slot}, copied)


@pytest.fixture
def merger() -> ReportMerger:
    """A, B and C train in generation 2."""
    found = ReportMerger()
    assert found.sent([A, B, C], world(2)) == []
    for worker in (A, B, C):
        found.received(worker, resumed(worker), 1.0)
    assert found.flush_at is None
    return found


def test_reports_are_sent_together_when_the_last_member_has_reported(merger):
    assert merger.sent([A, B, C], Broken(2, "lost")) == []
    assert merger.received(A, ready(A), 2.0) == merger.received(C, ready(C), 2.001) == []
    assert merger.flush_at == 2.0 + HOLD_S
    [together] = merger.received(B, ready(B), 2.002)
    assert isinstance(together, HeardTogether)
    assert [*together.event.each()] == [
        events.WorkerReady(worker, *msgspec.structs.astuple(ready(worker))) for worker in (A, C, B)
    ]
    assert from_agent.decode(encoded(together)) == together
    assert merger.flush_at is None


def test_resumed_workers_are_merged_with_the_times_of_each():
    merger = ReportMerger()
    merger.sent([A, B], world(2))
    assert merger.received(A, resumed(A, copied=7), 1.0) == []
    [together] = merger.received(B, resumed(B), 1.0)
    assert isinstance(together, HeardTogether)
    assert [*together.event.each()] == [
        events.WorkerResumed(A, 2, {"told": 1.5, "group": 20.0}, 7),
        events.WorkerResumed(B, 2, {"told": 1.5, "group": 21.0}),
    ]
    assert from_agent.decode(encoded(together)) == together


def test_held_reports_are_sent_without_a_member_that_does_not_report(merger):
    merger.sent([A, B, C], Broken(2, "lost"))
    merger.received(A, ready(A), 2.0)
    merger.received(B, ready(B), 2.0)
    assert merger.flush_at == 2.0 + HOLD_S
    [together] = merger.flush()
    assert together.event.workers == [A, B]
    assert merger.received(C, ready(C), 3.0) == [Heard(C, ready(C))]


def test_held_reports_are_sent_when_the_missing_member_exits(merger):
    merger.sent([A, B, C], Broken(2, "lost"))
    merger.received(A, ready(A), 2.0)
    assert merger.gone(C) == []
    assert merger.gone(B) == [Heard(A, ready(A))]


def test_only_member_of_a_host_is_never_held():
    merger = ReportMerger()
    merger.sent([A], world(2))
    assert merger.received(A, resumed(A), 1.0) == [Heard(A, resumed(A))]
    merger.sent([A], Broken(2, "lost"))
    assert merger.received(A, ready(A), 2.0) == [Heard(A, ready(A))]
    assert merger.flush_at is None


@pytest.mark.parametrize("end", [Broken(2, "lost"), StopAt(2, 1, 7)])
def test_report_before_the_end_of_the_world_is_sent_at_once(merger, end):
    assert merger.received(A, ready(A), 2.0) == [Heard(A, ready(A))]
    merger.sent([A, B, C], end)
    assert merger.received(B, ready(B), 2.0) == []
    [together] = merger.received(C, ready(C), 2.0)
    assert together.event.workers == [B, C]


def test_other_message_of_a_worker_follows_its_held_report(merger):
    merger.sent([A, B, C], Broken(2, "lost"))
    merger.received(A, ready(A), 2.0)
    other = messages.Raised(2, None, "ValueError", "")
    assert merger.received(B, other, 2.0) == [Heard(B, other)]
    assert merger.received(A, other, 2.0) == [Heard(A, ready(A)), Heard(A, other)]


def test_cancelled_change_sends_the_held_reports(merger):
    merger.sent([A, B, C], StopAt(2, 1, 7))
    merger.received(A, ready(A), 2.0)
    assert merger.sent([A, B, C], Proceed(2, 1)) == [Heard(A, ready(A))]
    assert merger.received(B, ready(B), 2.0) == [Heard(B, ready(B))]


def test_newcomers_older_generations_shards_and_metadata_are_sent_at_once(merger):
    newcomer = Worker("h", 7)
    merger.sent([A, B, C], Broken(2, "lost"))
    first = ready(newcomer, 1, generation=0)
    assert merger.received(newcomer, first, 2.0) == [Heard(newcomer, first)]
    late = ready(A, generation=1)
    assert merger.received(A, late, 2.0) == [Heard(A, late)]
    sharded = ready(B, shards=ShardsHeld(1))
    assert merger.received(B, sharded, 2.0) == [Heard(B, sharded)]
    told = ready(C, metadata={"islands": "eu"})
    assert merger.received(C, told, 2.0) == [Heard(C, told)]


def test_different_reports_are_not_merged(merger):
    merger.sent([A, B, C], Broken(2, "lost"))
    merger.received(A, ready(A), 2.0)
    merger.received(B, ready(B, commit=Commit(2, 4)), 2.0)
    together, single = merger.received(C, ready(C), 2.0)
    assert together.event.workers == [A, C]
    assert single == Heard(B, ready(B, commit=Commit(2, 4)))


def test_lost_driver_discards_held_reports(merger):
    merger.sent([A, B, C], Broken(2, "lost"))
    merger.received(A, ready(A), 2.0)
    merger.reset()
    assert merger.flush_at is None
    assert merger.flush() == []
    assert merger.received(B, ready(B), 2.0) == [Heard(B, ready(B))]  # repeated to the next driver


def test_observation_of_a_worker_follows_its_held_report(merger):
    merger.sent([A, B, C], Broken(2, "lost"))
    merger.received(A, ready(A), 2.0)
    assert merger.observed(B) == []
    assert merger.observed(A) == [Heard(A, ready(A))]
    assert merger.flush_at is None


def test_reports_are_merged_when_the_agent_serves_another_job_with_lower_generations(merger):
    merger.serves("first")
    merger.serves("second")
    merger.sent([A, B], world(1))
    assert merger.received(A, resumed(A, 1), 3.0) == []
    [together] = merger.received(B, resumed(B, 1), 3.0)
    assert together.event.workers == [A, B]


def test_generation_of_a_job_is_kept_when_its_next_driver_attaches(merger):
    merger.serves("first")
    merger.sent([A, B, C], world(2))
    merger.reset()
    merger.serves("first")
    merger.sent([A, B, C], Broken(2, "lost"))
    assert merger.received(A, ready(A), 3.0) == []


# ---- the driver ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulations() -> list[Simulation]:
    found = [Simulation(seed, workers=8, steps=60, mild=seed % 2 == 0, slots=4) for seed in MERGING]
    for each in found:
        each.run()
    return found


def merged(simulation: Simulation) -> int:
    kinds = (events.WorkersReady, events.WorkersResumed)
    return sum(isinstance(entry.event, kinds) for entry in simulation.driver.entries)


def single(event: events.Event) -> Iterator[tuple[events.Event, bool]]:
    """Yield the reports of an event, each with whether another one follows."""
    reports: list[events.Event] = [event]
    if isinstance(event, (events.WorkersReady, events.WorkersResumed)):
        reports = [*event.each()]
    for number, each in enumerate(reports, 1):
        yield each, number < len(reports)


def test_merged_reports_lead_to_the_same_decisions_and_state_as_single_ones(simulations):
    assert sum(map(merged, simulations)) > 20
    for simulation in simulations:
        together, apart = Membership(simulation.settings), Membership(simulation.settings)
        for entry in simulation.driver.entries:
            actions = together.handle(entry.event, entry.at, more=entry.more)
            expected = []
            for event, more in single(entry.event):
                expected += apart.handle(event, entry.at, more=more or entry.more)
            assert actions == expected
            assert together.next_deadline() == apart.next_deadline()
            together.check()
        for each in (together, apart):
            each.story.clear()
            each.worlds.world._resumed = dict.fromkeys(each.worlds.world._resumed)
        assert take_snapshot(together) == take_snapshot(apart)


def test_merged_reports_lead_to_the_same_view_and_page_as_single_ones(simulations):
    for simulation in simulations:
        together, apart = page(), page()
        for entry in simulation.driver.entries:
            together.view.note(entry.event, entry.actions, entry.at)
            for event, more in single(entry.event):
                apart.view.note(event, [] if more else entry.actions, entry.at)
            assert views(together.view) == views(apart.view)
            assert together.patch(entry.at) == apart.patch(entry.at)
            assert together.spent.job == apart.spent.job


def page() -> PageModel:
    return PageModel(TimeSpent(JobView()), name="", command=[], least=1, most=8)


def views(view: JobView) -> list[dict[str, object]]:
    fields = dataclasses.fields(next(iter(view.workers.values()))) if view.workers else ()
    return [{f.name: getattr(each, f.name) for f in fields} for each in view.workers.values()]


def test_reports_after_the_end_of_the_job_release_their_workers():
    membership = Membership(Settings(elastic=True, np=2, workers_min=1, workers_max=2))
    membership.handle(events.HostsChanged({"h": 2}), 1.0)
    for worker in (A, B):
        membership.handle(events.WorkerConnected(worker, 1), 2.0)
    membership.handle(events.StopRequested("Ctrl-C", 130), 3.0)
    assert membership.over
    event = events.WorkersReady([A, B], [1, 2], 0, None, "10.0.0.1")
    actions = membership.handle(event, 4.0)
    assert [type(each) for each in actions] == [events.LetGo] * 2


def test_order_of_ready_workers_is_that_of_the_report_when_one_of_them_is_frozen():
    talk = running(4)
    talk.tell(exited("h:3"))
    members = [Worker("h", slot, 1) for slot in range(3)]
    talk.m.roster[members[1]].frozen = "stopped by a signal"
    event = events.WorkersReady(members, [1, 2, 3], 2, Commit(2, 5), "10.0.0.1", "x", number=9)
    talk.m.handle(event, talk.now, more=True)
    assert [record.worker for record in talk.m.roster.at(WorkerStage.READY)] == members


def test_invalid_merged_reports_change_nothing():
    talk = running(3, workers_max=4)
    talk.tell(hosts(h=4))
    starting = Worker("h", 3, 1)
    assert talk.m.roster[starting].stage is WorkerStage.STARTING
    before = [record.stage for record in talk.m.roster.values()]
    for event in (
        events.WorkersReady([starting], [1], 2, None, "10.0.0.1"),
        events.WorkersReady([Worker("h", 9, 1)], [1], 2, None, "10.0.0.1"),
        events.WorkersReady([], [], 2, None, "10.0.0.1"),
        events.WorkersResumed([starting, Worker("h", 9, 1)], 2, {"told": [1.0, 1.0]}),
        events.WorkersResumed([], 2, {}),
    ):
        assert talk.tell(event) == []
        assert [record.stage for record in talk.m.roster.values()] == before


def test_worker_outside_the_world_does_not_count_as_resumed():
    talk = started(3, workers_max=4)
    talk.ready("h:0", "h:1", "h:2")
    talk.tell(hosts(h=4))
    together = events.WorkersResumed(
        [Worker("h", 0, 1), Worker("h", 1, 1)], 2, {"told": [1.0, 2.0]}
    )
    single = events.WorkerResumed(Worker("h", 3, 1), 2, {"told": 9.0})
    assert not has(events.ReportRecovery, talk.tell(together, single))
    others = events.WorkersResumed([Worker("h", 2, 1), Worker("h", 3, 1)], 2, {"told": [3.0, 9.0]})
    assert the(events.ReportRecovery, talk.tell(others)).phases_ms["told"] == 3.0
