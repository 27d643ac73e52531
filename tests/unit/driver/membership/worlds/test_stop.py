"""Requests to stop a job, at once or after a last checkpoint."""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    BreakWorld,
    CallOffChange,
    CheckpointMade,
    DriverRestarted,
    EndJob,
    HastenCheckpoint,
    HostLeaving,
    HostStaying,
    KillWorker,
    LetGo,
    Notice,
    PrepareChange,
    PublishWorld,
    StartWorker,
    StopRequested,
    WorkerPaced,
    WorkerReconnected,
)
from elastic.driver.job.job_decisions import JobDecisions
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Commit
from harness.conversation import (
    MembershipConversation,
    exited,
    failed,
    has,
    leaving,
    returned,
    running,
    said,
    static,
    the,
    worker,
)
from harness.golden import recorded

TERM = StopRequested("SIGTERM at the driver", 143, 6.0)


def three(**settings: object) -> MembershipConversation:
    return running(3, workers_min=1, restarts=3, durable=True, **settings)


def made(talk: MembershipConversation, number: int = 4) -> CheckpointMade:
    return CheckpointMade(Commit(talk.m.generation, number))


def test_stop_writes_a_last_checkpoint_first():
    talk = three()
    talk.tell(made(talk, 2))
    actions = talk.tell(TERM)
    assert the(HastenCheckpoint, actions).rank0 == worker("h:0") and not has(EndJob, actions)
    end = the(EndJob, talk.tell(made(talk)))
    assert end.code == 143
    assert end.reason == because(
        ReasonKind.STOPPED, why="SIGTERM at the driver", newest="2.4", made=True, within_s=6.0
    )


def test_stop_without_a_checkpoint_in_time_ends_the_job_and_reports_the_newest_checkpoint():
    talk = three()
    talk.tell(made(talk, 2), TERM)
    assert not has(EndJob, talk.wait(5.9))
    end = the(EndJob, talk.wait(0.2))
    assert end.code == 143
    assert end.reason == because(
        ReasonKind.STOPPED, why="SIGTERM at the driver", newest="2.2", made=False, within_s=6.0
    )


def test_second_request_ends_at_once():
    talk = three()
    talk.tell(TERM)
    assert the(EndJob, talk.tell(TERM)).reason == as_sentence("SIGTERM at the driver")


@pytest.mark.parametrize(
    ("talk", "request_"),
    [
        (running(2, workers_min=1), TERM),
        (MembershipConversation(np=2, restarts=3, durable=True), TERM),
        (running(2, restarts=3, durable=True), StopRequested("Ctrl-C at the driver", 130)),
    ],
    ids=["no checkpoints", "before training", "Ctrl-C"],
)
def test_stop_ends_at_once_without_a_checkpoint_to_wait_for(
    talk: MembershipConversation, request_: StopRequested
):
    assert the(EndJob, talk.tell(request_)).code == 1


def test_checkpoint_in_progress_does_not_count_as_the_last():
    talk = three()
    talk.tell(WorkerPaced(worker("h:0"), 2, 9, 0.0, 1.0, commits=9, commit=Commit(2, 9)))
    talk.tell(TERM)
    assert not has(EndJob, talk.tell(made(talk, 7)))
    assert has(EndJob, talk.tell(made(talk, 10)))


def test_checkpoint_of_an_earlier_world_does_not_count_as_the_last():
    talk = three()
    talk.tell(TERM)
    assert not has(EndJob, talk.tell(CheckpointMade(Commit(1, 900))))


def test_static_job_writes_a_last_checkpoint():
    talk = static(2, durable=True)
    talk.ready("h:0", "h:1")
    assert has(HastenCheckpoint, talk.tell(TERM))
    assert has(EndJob, talk.tell(made(talk)))


def test_members_of_a_static_job_write_their_current_state():
    talk = static(2, durable=True)
    talk.ready("h:0", "h:1")
    talk.tell(TERM)
    generation = talk.m.generation
    actions = talk.tell(failed("h:1", generation))
    assert has(BreakWorld, actions) and not has(EndJob, actions)
    actions = talk.ready("h:0", "h:1", commit=(generation, 7))
    world = the(PublishWorld, actions)
    assert len(world.members) == 2 and world.checkpoint and world.commit == Commit(generation, 7)
    assert has(HastenCheckpoint, actions)
    assert the(EndJob, talk.tell(made(talk, 0))).code == 143


def test_next_world_writes_the_checkpoint_after_a_loss():
    talk = three()
    talk.tell(exited("h:0"))
    assert not has(EndJob, talk.tell(TERM))
    actions = talk.ready("h:1", "h:2", commit=(2, 3))
    assert the(HastenCheckpoint, actions).generation == 3
    assert has(EndJob, talk.tell(made(talk)))


def test_signalled_workers_stay_for_the_last_checkpoint():
    """As with a batch system or systemd, which signals every process."""
    talk = three()
    assert has(PrepareChange, talk.tell(leaving("h:2")))
    actions = talk.tell(TERM)
    assert has(CallOffChange, actions) and has(HastenCheckpoint, actions)
    assert not has(PrepareChange, talk.tell(leaving("h:0")))
    assert has(EndJob, talk.tell(made(talk)))


def test_members_with_signalled_loader_workers_write_their_current_state():
    """Each is asked to leave, and its user code raises. The next world has all of them."""
    talk = running(3, workers_min=3, restarts=3, durable=True, reset_limit=0)
    talk.tell(TERM, *(leaving(f"h:{slot}") for slot in range(3)))
    assert not has(EndJob, talk.tell(failed("h:1", 2)))
    actions = talk.ready("h:0", "h:1", "h:2", commit=(2, 7))
    world = the(PublishWorld, actions)
    assert len(world.members) == 3 and world.checkpoint and world.commit == Commit(2, 7)
    assert has(HastenCheckpoint, actions) and not has(LetGo, actions)
    assert the(EndJob, talk.tell(made(talk, 0))).code == 143


def test_world_of_a_continuing_job_starts_without_a_checkpoint():
    talk = three()
    talk.tell(failed("h:1", 2))
    actions = talk.ready("h:0", "h:1", "h:2", commit=(2, 7))
    assert not the(PublishWorld, actions).checkpoint


def test_no_worker_is_started_during_a_stop():
    talk = three()
    talk.tell(TERM, exited("h:1"))
    assert not has(StartWorker, talk.wait(5))


def test_world_that_returns_during_a_stop_ends_normally():
    talk = three()
    decisions = JobDecisions(talk.m, leave_s=30, running=talk.m.members, members=None)
    now = talk.m.worlds.actions.now
    for event in (TERM, *(returned(f"h:{slot}", 2) for slot in range(3))):
        decisions.follow(event, decisions.answer(event, now), now)
    assert decisions.ending is not None and decisions.ending.code == 0
    assert has(KillWorker, decisions.follow(TERM, decisions.answer(TERM, now), now))
    assert decisions.ending.code == 143


@pytest.mark.parametrize(
    ("events", "within_s"),
    [
        ([HostLeaving("h", Notice("x", 600.0), alone=True), TERM, HostStaying("h")], 6.1),
        ([TERM, HostLeaving("h", Notice("x", 600.0), alone=True)], 6.1),
        ([TERM, HostLeaving("h", Notice("x", None), alone=True)], 6.1),
        ([HostLeaving("h", Notice("x", 4.0), alone=True), TERM], 3.0),
    ],
    ids=["it stays", "later", "some day", "earlier"],
)
def test_notices_do_not_delay_a_stop(events: list, within_s: float):
    talk = three()
    talk.tell(*events)
    assert has(EndJob, talk.wait(within_s))


def test_successor_driver_asks_again_and_ends_with_the_same_code():
    talk = three()
    talk.tell(TERM)
    talk.m = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    talk.tell(DriverRestarted())
    assert has(HastenCheckpoint, talk.tell(WorkerReconnected(worker("h:0"), 2, True)))
    assert the(EndJob, talk.tell(made(talk))).code == 143


def test_operator_sees_the_time_limit_of_a_stop():
    recorded("log", said(three().tell(TERM)))
