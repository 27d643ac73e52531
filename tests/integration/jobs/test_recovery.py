"""Failures in a job: training with the results of an undisturbed one, and a clear end where there is no way on."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest

from elastic.driver.reasons import ReasonKind
from harness import wording
from harness.history import (
    RETURN,
    SCRIPTS,
    STAY_AWAY,
    TRAINING,
    History,
    kill_slot,
    pid_of,
    sizes,
    started,
)
from harness.job import Job

pytestmark = pytest.mark.forked


def until_steps(training: Job, number: int) -> None:
    """All workers' records together."""
    training.until(lambda: len(History(training).all("step")) > number, f"{number} steps")


def until_saved(training: Job, worker: str, step: int) -> None:
    training.until(
        lambda: History(training).has(worker, "save", step=step), f"step {step} at {worker}"
    )


# ---- training goes on as it would have -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [pytest.param("SGD", marks=pytest.mark.nightly), "Adam"])
def test_losses_equal_an_undisturbed_run_after_kills_and_joins(job, optimizer):
    """Defects B and E: slots return, all of them, and Python values go back with the weights."""
    dying = "slot=0,step=5,place=backward;slot=2,step=9,place=commit;slot=1,step=12,place=forward"
    training = started(
        job,
        3,
        RETURN,
        STEPS="30",
        OPTIMIZER=optimizer,
        DIE=f"{dying};slot=1,start=2,step=22,place=optimizer",
        HOLD="11:size=3;20:size=3;26:size=3",
    )
    training.succeed()
    assert sizes(training)[-1] == 3
    History(training).check(steps=30, optimizer=optimizer)


def test_training_survives_sigkill_of_workers_at_any_moment(job):
    """As by `kill -9`: without preparation, at any moment."""
    training = started(job, 3, STEPS="400")
    for size, rank in ((3, 2), (2, 0)):
        training.wait_for_world(size)
        reached = len(History(training).all("step"))
        until_steps(training, reached + 30)
        training.kill(rank)
    training.succeed()
    History(training).check(steps=400)


def test_agent_merges_the_reports_of_its_workers_after_a_loss(job):
    flags = f"-H localhost:3 --resume {STAY_AWAY}"
    training = started(job, 3, flags, STEPS="200", HOLD="150:size=2")
    training.wait_for_world(3)
    until_steps(training, 30)
    training.kill(2)
    training.wait_for_world(2)
    training.succeed()
    History(training).check(steps=200)
    # When the world ended and when the next one began, both survivors reported at about the same time.
    kinds = Counter(record["event"]["type"] for record in training.records() if "event" in record)
    assert kinds["WorkersReady"] + kinds["WorkersResumed"] > 0


@pytest.mark.nightly
def test_losses_equal_an_undisturbed_run_when_few_commits_are_copied(job):
    """The steps since the newest copy are repeated after a kill, and none at a planned change."""
    training = started(
        job,
        3,
        f"--commit-budget 0.5 {RETURN}",
        STEPS="240",
        OPTIMIZER="Adam",
        DIE="slot=0,step=90,place=backward;slot=2,step=150,place=forward",
        HOLD="120:size=3;200:size=3",
    )
    training.succeed()
    history = History(training)
    history.check(steps=240, optimizer="Adam")
    copied = {each["step"] for each in history.all("save")}
    assert 240 in copied and len(copied) < 200, "few of the calls of commit() made a copy"
    entered = [each["step"] for entries in history.enters().values() for each in entries[:1]]
    assert entered == sorted(entered) and {0, *entered} <= {0, *copied}


@pytest.mark.parametrize(
    ("flags", "full"),
    [pytest.param(STAY_AWAY, 0, marks=pytest.mark.nightly), (RETURN, 3)],
    ids=["kills", "joins"],
)
def test_a_script_of_horovod_counts_every_sample_once(job, flags, full):
    """Defects F and G: in the committed history, but for what fills the last round of an epoch."""
    training = job(
        f"-np 3 --min-np 1 {flags}",
        ["python", SCRIPTS / "horovod_elastic.py"],
        env={"ELASTIC_DIGESTS": "1", "DIE": "2,8 0,27", "FULL": str(full)},
    )
    training.succeed()
    counts: dict[int, Counter[int]] = {epoch: Counter() for epoch in (0, 1)}
    for path in (training.folder / "samples").iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            counts[entry["epoch"]].update(entry["samples"])
    size = full or 1
    for epoch, seen in counts.items():
        assert set(seen) == set(range(203)), f"epoch {epoch} has left out samples"
        assert seen.total() - 203 <= 2, f"epoch {epoch} has repeated {seen.most_common(5)}"
    training.wait_for(rf"done 2 {size} {0.01 * size:g}", count=size)
    History(training).check_equal()


# ---- errors of user code -------------------------------------------------------------------------


def test_exception_of_one_worker_restarts_its_slot_and_horovod_errors_only_recover(job):
    """After its own one, its traceback is shown, its slot cools down and returns, the others go on at once. Raised by
    the script, `HorovodInternalError` costs nobody.
    """
    raising = "step=2,place=stepped,error=horovod,generation=2;step=4,place=stepped,error=value"
    raising = ";".join(f"slot=1,{each}" for each in raising.split(";"))
    training = started(job, 3, RETURN, RAISE=raising, HOLD="7:size=3")
    training.succeed()
    training.wait_for(r"^\[(\d|localhost:1)\] ValueError: this sample is damaged")
    training.wait_for(r"rank \d \(localhost:1#1 .*ValueError")
    training.wait_for(wording.LOCALHOST_ENDED_EXIT_CODE)
    assert sizes(training)[-4:] == [3, 3, 2, 3]
    assert len(training.events("WorkerRaised")) == 1
    History(training).check()


def test_worker_that_called_sys_exit_delays_no_recovery_while_its_process_runs(job):
    training = started(job, 3, RAISE="slot=1,step=5,place=stepped,error=exit")
    training.wait_for_world(3)
    training.wait_for_world(2)  # its sockets are still open, and its process runs on
    os.kill(pid_of(training, 1), 0)
    assert not training.events("WorkerExited")
    broken = training.actions("BreakWorld")[0]["reason"]["kind"]
    assert broken in (ReasonKind.LOST_QUIT.value, ReasonKind.COLLECTIVE_BROKE.value)
    (training.folder / "exit").touch()
    training.succeed()
    History(training).check()


def test_same_exception_on_all_workers_ends_the_job(job):
    """Defect M: no endless loop of restoring what will fail again."""
    training = started(job, 3, RAISE="step=4,place=stepped,error=value")
    assert training.wait() == 1
    training.wait_for(wording.JOB_ENDS_EXIT_CODE)
    assert sizes(training)[2:] in ([], [2])  # the first may have left before the second came there


def test_the_same_exception_after_a_regroup_at_the_same_commit_ends_the_job(job):
    raising = "slot=1,step=4,place=forward,error=value;step=4,place=forward,size=2,error=value"
    training = started(job, 3, RAISE=raising)
    assert training.wait() == 1
    training.wait_for(wording.RAISED_SAME_EXCEPTION)
    assert sizes(training)[-1] == 2


@pytest.mark.parametrize(
    "when",
    ["shape", pytest.param("late", marks=pytest.mark.nightly)],
    ids=["at once", "after the world broke of it"],
)
def test_a_mismatch_of_shapes_is_an_error_of_the_script(job, when):
    """Defect M: it looks like a failed collective, but trying again would only repeat it."""
    training = started(job, 2, RAISE=f"step=4,place=stepped,error={when}")
    assert training.wait() == 1
    [ended] = training.actions("EndJob")
    assert ended["reason"]["kind"] == ReasonKind.TENSORS_DIFFER.value
    assert not training.events("WorkerFailed")


def test_worlds_that_break_repeatedly_without_lost_workers_end_the_job(job):
    """Defect M: without a lost or new worker, a third attempt is the last."""
    training = started(job, 2, RAISE="step=4,place=stepped,error=horovod")
    assert training.wait() == 1
    training.wait_for(wording.WORLDS_ROW_BROKE_NOBODY)


def test_user_code_that_catches_every_exception_does_not_swallow_a_loss(job):
    training = started(job, 3, CARELESS="1", DIE="slot=1,step=4,place=backward")
    training.succeed()
    history = History(training)
    assert not history.all("swallowed")
    history.check()


# ---- limits --------------------------------------------------------------------------------------


def test_reset_limit_ends_the_job_at_the_next_failure(job):
    training = started(
        job,
        3,
        f"{STAY_AWAY} --reset-limit 1",
        DIE="slot=2,step=3,place=forward;slot=1,step=6,place=forward",
    )
    assert training.wait() == 1
    training.wait_for(wording.JOB_ENDS_EXIT_CODE_2)
    assert len(training.actions("BreakWorld")) == 1


def test_job_below_min_np_logs_its_wait_and_ends_at_the_elastic_timeout(job):
    """Defect A: no wait without an end."""
    training = job(
        f"-np 2 --min-np 2 {STAY_AWAY} --elastic-timeout 2",
        TRAINING,
        env={"DIE": "slot=1,step=3,place=forward"},
    )
    training.wait_for(wording.WAITING_MORE_WORKER_READY)
    assert training.wait(20) == 1
    training.wait_for(wording.ONLY_WORKERS_READY_AFTER)


def test_slot_whose_workers_crash_repeatedly_is_given_up(job):
    """Defect B: the slot is, not its host. It backs off first, and its last words are shown."""
    training = started(
        job,
        2,
        "--blacklist-cooldown-range 0.1 0.2 --slot-attempts 3",
        RAISE="slot=1,place=before run,error=value,start=any",
        HOLD="5:file=go",
    )
    training.wait_for(wording.LOCALHOST_ENDED_EXIT_CODE_1)
    training.wait_for(wording.LOCALHOST_ENDED_EXIT_CODE_2)
    training.wait_for(wording.SLOT_LOCALHOST_GIVEN_UP_3)
    (training.folder / "go").touch()
    training.succeed()
    History(training).check()


# ---- leaving -------------------------------------------------------------------------------------


def test_sigterm_lets_a_worker_leave_at_its_next_commit(job):
    """Defect N: no commit is lost, and no reset is counted. Rank 0 may leave like any other."""
    training = started(job, 3, "--reset-limit 0", HOLD="4:size=2;6:size=1")
    for slot in (1, 0):
        held = 4 if slot == 1 else 6
        until_saved(training, "localhost:2#1", held)
        os.kill(pid_of(training, slot), signal.SIGTERM)
        training.wait_for_world(2 if slot == 1 else 1)
        if slot == 1:  # the job may be over before the other one's end is noticed
            training.wait_for(wording.LOCALHOST_LEFT_EXIT_CODE_2)
    training.succeed()
    assert not training.actions("BreakWorld")
    codes = {e["worker"][1]: e["code"] for e in training.events("WorkerExited")}
    assert codes == {0: 0, 1: 0, 2: 0}
    assert sizes(training)[-3:] == [3, 2, 1]
    history = History(training)
    history.check()
    repeated = [r["step"] for r in history.by_worker["localhost:2#1"] if r["what"] == "step"]
    assert repeated == list(range(10)), "no step was done twice"


def test_second_worker_is_killed_while_the_job_waits_below_min_np(job):
    """Defect Y: below --min-np the job continues when slots return. The survivor has kept the commit."""
    training = job(
        f"-np 3 --min-np 3 {RETURN}",
        TRAINING,
        env={"ELASTIC_DIGESTS": "1", "DIE": "slot=0,step=3,place=forward"},
    )
    training.wait_for(wording.WAITING_MORE_WORKER)
    kill_slot(training, 1)
    training.succeed()
    assert sizes(training)[-2:] == [3, 3]
    History(training).check()
