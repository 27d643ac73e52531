"""Outcome of a job: membership's actions, and which workers are awaited or killed afterwards. As conversations."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.driver.events import (
    EndJob,
    HostLost,
    HostReported,
    KillWorker,
    LetGo,
    Member,
    PublishWorld,
    Report,
    StartWorker,
    StopRequested,
    TimePassed,
    WorkerExited,
    WorkerQuit,
    WorkerRaised,
)
from elastic.driver.job.job_decisions import Decider, JobDecisions
from elastic.driver.job.shutdown import GRACE_S
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Address, Place, Worker
from harness.golden import recorded

A, B, SPARE = Worker("h1", 0), Worker("h2", 0), Worker("h2", 1)
PLACES = {A: Place(0, 2, 0, 1, 0, 2), B: Place(1, 2, 0, 1, 1, 2)}
LEAVE_S = 10.0
WHY = as_sentence("because")
TRAINED = EndJob(0, WHY)
FAILED = EndJob(7, WHY)


class Talk:
    """Decisions, the actions that membership will return, and the time."""

    def __init__(self, **past: Any) -> None:
        self.membership = create_autospec(Decider, instance=True)
        self.membership.next_deadline.return_value = None
        self.decisions = JobDecisions(self.membership, leave_s=LEAVE_S, **past)
        self.now = 100.0

    def hear(self, event: Any, *answer: Any, at: float | None = None) -> list[Any]:
        self.now = self.now if at is None else at
        self.membership.handle.return_value = [*answer]
        answered = self.decisions.answer(event, self.now)
        return self.decisions.follow(event, answered, self.now)

    def trains(self) -> Talk:
        members = [Member(worker, place) for worker, place in PLACES.items()]
        world = PublishWorld(1, members, Address("h1", 1), 0, None, WHY)
        starts = [StartWorker(worker, PLACES[A], WHY) for worker in (A, B, SPARE)]
        assert self.hear(TimePassed(), *starts, world) == [*starts, world]
        return self

    @property
    def code(self) -> int:
        assert self.decisions.ending is not None
        return self.decisions.ending.code


def killed(actions: list[Any]) -> list[Worker]:
    return [action.worker for action in actions if isinstance(action, KillWorker)]


def exited(worker: Worker, code: int = 0) -> WorkerExited:
    return WorkerExited(worker, code)


def test_successful_job_awaits_its_members_and_ends_with_the_last():
    talk = Talk().trains()
    assert talk.decisions.members == PLACES and not talk.decisions.over
    let_go = LetGo(SPARE, because(ReasonKind.JOB_ENDED))
    assert talk.hear(TimePassed(), let_go, TRAINED) == [let_go, TRAINED]
    assert talk.hear(exited(A)) == []
    assert talk.decisions.next_deadline() == 100.0 + LEAVE_S
    assert killed(talk.hear(TimePassed(), at=110.0)) == [SPARE]
    talk.hear(exited(SPARE, -9))
    assert not talk.decisions.over
    talk.hear(exited(B))
    assert (talk.decisions.over, talk.code, talk.decisions.running) == (True, 0, set())


def test_released_member_is_not_awaited_as_a_member():
    talk = Talk().trains()
    talk.hear(TimePassed(), LetGo(B, because(ReasonKind.JOB_ENDED)))
    talk.hear(TimePassed(), TRAINED)
    assert talk.hear(exited(B, 3)) == [], "it fails nothing"
    assert killed(talk.hear(TimePassed(), at=110.0)) == [SPARE]


def test_exit_that_ends_the_job_is_no_failure_afterwards():
    talk = Talk().trains()
    assert talk.hear(exited(A, 3), FAILED) == [FAILED]
    assert (talk.code, talk.decisions.running) == (7, {B, SPARE})


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (
            WorkerRaised(B, 1, None, "AssertionError: x", "Traceback"),
            because(ReasonKind.LOST_RAISED, worker=str(B), summary="AssertionError: x"),
        ),
        (
            WorkerQuit(B, 1, 3, "sys.exit(3)"),
            because(ReasonKind.LOST_QUIT, worker=str(B), call="sys.exit(3)"),
        ),
    ],
)
def test_training_failure_after_other_workers_returned_is_not_code_after_training(event, cause):
    talk = Talk().trains()
    talk.hear(event, TRAINED)
    [line] = talk.hear(exited(B, 1))
    assert line.about == because(ReasonKind.FAILED_IN_TRAINING, cause=cause)
    talk.hear(exited(A)), talk.hear(exited(SPARE))
    assert (talk.decisions.over, talk.code) == (True, 1)


def test_strict_job_on_fewer_workers_ends_like_a_success_except_for_its_exit_code():
    talk = Talk().trains()
    facts: dict[str, Any] = {"members": 1, "generation": 1, "began": 2, "failed": [WHY]}
    short = EndJob(0, because(ReasonKind.ALL_RETURNED, **facts, strict=True))
    outcome, line = talk.hear(TimePassed(), short)
    assert (outcome, line.about) == (short, because(ReasonKind.FEWER_RETURNED))
    assert killed(talk.hear(TimePassed(), at=110.0)) == [SPARE], "members take their time"
    for worker in (SPARE, A, B):
        talk.hear(exited(worker))
    assert (talk.decisions.over, talk.code) == (True, 1)
    talk = Talk().trains()
    lenient = EndJob(0, because(ReasonKind.ALL_RETURNED, **facts, strict=False))
    assert talk.hear(TimePassed(), lenient) == [lenient]
    assert talk.code == 0


def test_exit_after_success_fails_the_job():
    talk = Talk().trains()
    talk.hear(TimePassed(), TRAINED)
    [line] = talk.hear(exited(A, 3))
    assert isinstance(line, Report)
    recorded("log", line.text)
    assert talk.code == 1


@pytest.mark.parametrize(
    "event", [HostLost("h2", "silent"), HostReported("h2", [], [B, SPARE])], ids=["lost", "back"]
)
def test_worker_whose_exit_is_unobservable_is_not_awaited(event):
    talk = Talk().trains()
    talk.hear(event)
    assert talk.decisions.running == {A}
    talk.hear(TimePassed(), FAILED)
    talk.hear(exited(A, 1))
    assert talk.decisions.over


def test_host_lost_after_success_fails_the_job():
    talk = Talk().trains()
    talk.hear(TimePassed(), TRAINED)
    [line] = talk.hear(HostLost("h2", "silent"))
    recorded("log", line.text)
    talk.hear(exited(A))
    assert talk.decisions.over and talk.code == 1


def test_stop_sets_the_exit_code_and_a_second_stop_ends_the_grace_period():
    talk = Talk().trains()
    assert talk.hear(StopRequested("Ctrl-C", 130), EndJob(1, WHY)) == [EndJob(130, WHY)]
    assert talk.decisions.next_deadline() == 100.0 + GRACE_S
    assert killed(talk.hear(StopRequested("Ctrl-C", 143), at=100.2)) == [A, B, SPARE]
    assert talk.code == 130, "the first counts"


def test_second_stop_ends_the_grace_period_while_the_first_waits_for_a_checkpoint():
    talk = Talk().trains()
    assert talk.hear(StopRequested("SIGTERM", 143, 6.0)) == []
    actions = talk.hear(StopRequested("SIGTERM", 143), EndJob(1, WHY))
    assert actions[0] == EndJob(143, WHY) and killed(actions) == [A, B, SPARE]


def test_stop_after_success_is_sent_to_running_workers():
    talk = Talk().trains()
    talk.hear(TimePassed(), TRAINED)
    stopped = talk.hear(StopRequested("Ctrl-C", 130))
    assert stopped == [EndJob(130, as_sentence("Ctrl-C"))]
    assert killed(talk.hear(TimePassed(), at=100.0 + GRACE_S)) == [A, B, SPARE]
    assert talk.code == 130


def test_end_without_an_operator_keeps_its_exit_code():
    """As when discovery ends before it found any host."""
    talk = Talk().trains()
    assert talk.hear(StopRequested("no host"), EndJob(1, WHY)) == [EndJob(1, WHY)]
    assert talk.decisions.stop_code is None


def test_membership_that_raised_is_not_called_again_and_all_workers_are_killed():
    talk = Talk().trains()
    talk.membership.handle.side_effect = AssertionError("never thought of this")
    talk.membership.next_deadline.return_value = 100.5
    with pytest.raises(AssertionError):
        talk.decisions.answer(TimePassed(), 100.0)
    assert talk.decisions.follow(TimePassed(), [FAILED], 100.0) == [FAILED]
    assert talk.hear(exited(A)) == [], "it would have raised again"
    assert talk.decisions.next_deadline() == 100.0 + GRACE_S
    assert killed(talk.hear(TimePassed(), at=100.0 + GRACE_S)) == [B, SPARE]
    for worker in (B, SPARE):
        talk.hear(exited(worker, -9))
    assert talk.decisions.over and talk.code == 7


def test_successor_driver_of_an_ended_job_awaits_its_workers():
    talk = Talk(running=[A, B], members=PLACES)
    talk.hear(TimePassed(), TRAINED)
    talk.hear(HostReported("h1", [A], [A]))
    talk.hear(exited(A))
    assert talk.decisions.running == {B}
    talk.hear(HostLost("h2", "its agent has not come back"))
    assert (talk.decisions.over, talk.code) == (True, 1)
