"""Workers that live and run, but make no progress while the others wait for them: they are named, write their
stacks, and are fenced; the others go on as if nothing had happened. The limits are shortened by flags.
"""

from __future__ import annotations

import time

import pytest

from elastic.driver.reasons import ReasonKind
from harness import wording
from harness.history import SCRIPTS, STAY_AWAY, History, sizes
from harness.job import Job

pytestmark = pytest.mark.forked

SOON = "--idle-timeout 2"
STALLING = ["python", SCRIPTS / "stalling.py"]


def stalling(job, np: int, stall: str, flags: str = SOON, **env: str) -> Job:
    env = {"ELASTIC_DIGESTS": "1", "STALL": stall} | env
    training: Job = job(f"-np {np} --min-np 1 {STAY_AWAY} {flags}", STALLING, env=env)
    return training


@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param("sleep", "in sleeps", marks=pytest.mark.nightly),
        pytest.param("lock", "in waits_for_a_lock_that_it_holds", marks=pytest.mark.nightly),
        ("gil", "in holds_the_interpreter_in_c"),
    ],
)
def test_a_worker_that_never_enters_the_collective_is_fenced(job, how, where):
    training = stalling(job, 3, f"slot=1,step=4,place=forward,how={how}")
    training.wait_for(wording.RANK_LOCALHOST_LOCALHOST_KEEPS)
    training.wait_for(rf"^\[\d\].*{where}$")
    training.succeed()
    assert sizes(training)[-1] == 2
    [(slot, reason)] = training.fences().items()
    assert (
        slot == 1
        and reason.kind is ReasonKind.IDLE
        and str(reason.facts["where"]).startswith("in '")
    )
    History(training).check()


def test_a_busy_worker_is_named_and_later_fenced(job):
    flags = "--idle-timeout 2 --busy-warning 1 --busy-timeout 3"
    training = stalling(job, 3, "slot=1,step=4,place=forward,how=loop", flags)
    training.wait_for(wording.WARNING_RANK_LOCALHOST_KEEPS)
    assert training.fences() == {}
    training.wait_for(r"^\[\d\].*in loops$")
    training.succeed()
    assert list(training.fences()) == [1]
    assert training.fences()[1].kind is ReasonKind.BUSY
    History(training).check()


def test_a_worker_that_misses_a_recovery_or_never_returns_is_fenced(job):
    """One died, all others gather: the one that hangs before it has said ready holds them up. At the end one does not
    return when all others have.
    """
    training = stalling(
        job,
        4,
        "slot=1,generation=2,place=restore,how=sleep;slot=2,place=end,how=sleep",
        DIE="slot=3,step=4,place=forward",
    )
    training.until(lambda: list(training.fences()) == [1, 2], "two fences", 60)
    training.wait()
    assert [reason.kind for reason in training.fences().values()] == [
        ReasonKind.IDLE,
        ReasonKind.IDLE,
    ]
    assert [len(world["members"]) for world in training.worlds() if world["generation"] == 3] == [2]
    History(training).check()


@pytest.mark.nightly
def test_all_workers_are_waited_for_until_the_collective_timeout_without_a_stall_check(job):
    """Nothing but the collective's own timeout ends it, if one is given."""
    flags = "--no-stall-check --gloo-timeout-seconds 3"
    training = stalling(job, 2, "slot=1,step=4,place=forward,how=sleep", flags)
    training.wait_for(wording.COLLECTIVE_BROKE_AT_LOCALHOST)
    assert training.fences() == {} and training.actions("DumpStacks") == []
    assert training.end() == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_straggler_when_a_standby_is_ready_then_is_replaced_without_losing_a_commit(job):
    """Named and replaced after two reports, each of which covers half a minute."""
    flags = "--max-np 3 -H localhost:4 --standbys 1 --replace-stragglers"
    training = stalling(job, 3, "slot=2,place=forward,how=slow", flags, STEPS="100000")
    deadline = time.monotonic() + 150
    members: list[int] = []
    while members != [0, 1, 3]:
        assert time.monotonic() < deadline, training.output
        time.sleep(0.2)
        members = sorted(
            member["worker"][1]
            for member in (training.worlds() or [{"members": []}])[-1]["members"]
        )
    (left,) = training.actions("LetGo")
    assert left["worker"] == ["localhost", 2, 1] and left["reason"]["kind"] == "replaced"
    assert training.fences() == {} and not training.actions("BreakWorld")
    assert training.end() == []


@pytest.mark.nightly
def test_the_straggler_is_named(job):
    training = stalling(job, 3, "slot=2,place=forward,how=slow", STEPS="2000")
    training.wait_for(wording.WARNING_RANK_LOCALHOST_IS_STRAGGLER, timeout=60)
    assert training.fences() == {}
    assert training.end() == []
