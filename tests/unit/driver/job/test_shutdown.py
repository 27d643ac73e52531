"""End of a job: which workers are awaited or killed, and the exit code."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver.events import (
    EndJob,
    KillWorker,
    Report,
    WorkerExited,
    WorkerFrozen,
    WorkerSpent,
    WorkerThawed,
)
from elastic.driver.job.shutdown import DEATH_S, GRACE_S, REMIND_S, Shutdown
from elastic.driver.membership.worlds.layout_diff import difference
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Place, Times, Worker
from harness.golden import recorded

A, B, SPARE = Worker("h1", 0), Worker("h1", 1), Worker("h1", 2)
MEMBERS = {A: Place(0, 2, 0, 2, 0, 1), B: Place(1, 2, 1, 2, 0, 1)}


def ending(code: int = 0, alive=(A, B, SPARE), now: float = 100.0, idle_s: float = 0.0) -> Shutdown:
    outcome = EndJob(code, as_sentence("because"))
    return Shutdown(outcome, members=MEMBERS, alive=alive, leave_s=10.0, idle_s=idle_s, now=now)


def report(actions) -> Report:
    line: Any = actions[0]
    assert len(actions) == 1 and isinstance(line, Report)
    return line


def killed(actions) -> list[Worker]:
    return [action.worker for action in actions if isinstance(action, KillWorker)]


def test_ending_without_workers_is_over_at_once():
    assert ending(0, alive=()).over
    assert ending(3, alive=()).code == 3


def test_members_have_time_after_success_and_other_workers_do_not():
    e = ending()
    assert e.next_deadline() == 110.0
    assert killed(e.overdue(110.0)) == [SPARE]
    assert e.handle(WorkerExited(SPARE, -9), 100.0) == []
    reminder = report(e.overdue(100.0 + REMIND_S)).text
    recorded("messages", reminder)
    assert killed(e.overdue(100_000.0)) == []
    e.handle(WorkerExited(A, 0), 100.0)
    assert killed(e.overdue(100_001.0)) == []
    e.handle(WorkerExited(B, 0), 100.0)
    assert (e.over, e.code) == (True, 0)


def test_member_that_fails_after_success_fails_the_job():
    e = ending(alive=(A, B))
    line = report(e.handle(WorkerExited(B, 3), 100.0))
    assert line.level == "error"
    recorded("log", line.text)
    e.handle(WorkerExited(A, 0), 100.0)
    assert e.over and e.code == 1


def test_worker_lost_with_its_host_is_not_awaited():
    e = ending()
    assert e.lost([SPARE], 100.0) == []
    line = report(e.lost([B], 100.0))
    recorded("log", line.text)
    e.handle(WorkerExited(A, 0), 100.0)
    assert e.over and e.code == 1
    failed = ending(7)
    assert failed.lost([A, B, SPARE], 100.0) == []
    assert failed.over and failed.code == 7


def test_workers_when_several_are_lost_with_their_host_then_one_line_names_all():
    recorded("log", report(ending().lost([A, B], 100.0)).text)


def test_failure_grants_a_moment_and_then_kills():
    e = ending(7)
    assert e.next_deadline() == 100.0 + GRACE_S
    assert e.overdue(100.5) == []
    assert killed(e.overdue(100.0 + GRACE_S)) == [A, B, SPARE]
    for worker in (A, B, SPARE):
        assert e.handle(WorkerExited(worker, -9), 100.0) == []
    assert e.over and e.code == 7


def test_unkillable_worker_is_left_behind():
    e = ending(7, alive=(A,))
    e.overdue(101.0)
    assert e.next_deadline() == 101.0 + DEATH_S
    line = report(e.overdue(101.0 + DEATH_S))
    recorded("log", line.text)
    assert e.over


def test_stop_ends_the_wait_and_a_second_stop_the_grace_period():
    e = ending()
    e.stopped(130, now=105.0)
    assert e.code == 130 and e.next_deadline() == 105.0 + GRACE_S
    assert killed(e.hurried(105.5)) == [A, B, SPARE]
    assert e.code == 130


def test_stop_after_the_kill_does_not_postpone_the_end():
    e = ending(7, alive=(A,))
    e.overdue(101.0)
    e.stopped(130, now=110.0)
    assert e.next_deadline() == 101.0 + DEATH_S


def test_layouts_are_compared_by_name():
    own = "w float32 [10, 20]\nb float32 [10]\nextra int64 []\nsame float32 [1]"
    expected = "w float32 [10, 30]\nb float32 [10]\nmissing int64 []\nsame float32 [1]"
    recorded("log", difference(own, expected).splitlines())
    recorded("messages", difference("a\nb", "b\na"))
    many = difference("\n".join(f"p{n} float32 [1]" for n in range(50)), "")
    assert many.splitlines()[-1] == "... and 40 more"


# ---- a second training -----------------------------------------------------------------------------------------------


def trains(e: Shutdown, worker: Worker = A) -> Shutdown:
    assert e.handle(WorkerSpent(worker, 1, Times(), "training"), 100.0) == []
    return e


def test_wait_for_a_failed_worker_in_a_second_training_has_a_limit():
    e = trains(ending(alive=(A, B)))
    assert killed(e.overdue(100_000.0)) == []
    assert "rank 1" in report(e.handle(WorkerExited(B, 1), 100_000.0)).text
    assert e.next_deadline() == 100_010.0
    assert killed(e.overdue(100_010.0)) == [A]


# Both during the grace period of others and after it.
@pytest.mark.parametrize("fails_at", [101.0, 200.0])
def test_second_training_may_be_reported_after_a_failure(fails_at):
    e = ending(alive=(A, B))
    if fails_at > 110.0:
        e.overdue(110.0)
    e.handle(WorkerExited(B, 1), fails_at)
    e.handle(WorkerSpent(A, 1, Times(), "training"), fails_at + 1.0)
    e.handle(WorkerSpent(A, 1, Times(), "training"), fails_at + 5.0)  # postpones nothing
    assert e.next_deadline() == fails_at + 11.0
    assert killed(e.overdue(fails_at + 11.0)) == [A]


def test_report_of_a_second_training_postpones_no_end():
    e = ending()
    e.stopped(130, now=105.0)
    e.handle(WorkerSpent(A, 1, Times(), "training"), 105.5)
    assert e.code == 130 and e.next_deadline() == 105.0 + GRACE_S


def test_host_lost_during_a_second_training_is_not_awaited():
    e = trains(ending(alive=(A, B)))
    e.lost([B], 200.0)
    assert (e.code, killed(e.overdue(210.0))) == (1, [A])


def test_worker_frozen_during_a_second_training_is_killed_after_the_idle_timeout():
    e = trains(ending(alive=(A, B), idle_s=30.0))
    assert e.handle(WorkerFrozen(B, "stopped by a signal"), 200.0) == []
    e.handle(WorkerFrozen(B, "stopped by a signal"), 202.0)  # repeated by its agent
    assert killed(e.overdue(229.9)) == []
    assert e.overdue(230.0) == [
        KillWorker(B, because(ReasonKind.FROZEN, how="stopped by a signal"))
    ]
    e.handle(WorkerExited(B, -9), 230.1)
    assert killed(e.overdue(240.1)) == [A]


@pytest.mark.parametrize("idle_s, again, thaws", [(0.0, 1, 0), (30.0, 0, 0), (30.0, 1, 1)])
def test_frozen_worker_is_not_killed_when_unawaited_thawed_or_the_limit_is_0(idle_s, again, thaws):
    e = ending(alive=(A, B), idle_s=idle_s)
    if again:
        trains(e)
    e.handle(WorkerFrozen(B, "stopped by a signal"), 200.0)
    if thaws:
        e.handle(WorkerThawed(B), 210.0)
    assert killed(e.overdue(100_000.0)) == []
