"""Long activities of healthy workers, beyond the limit of an idle worker: no worker is fenced."""

from __future__ import annotations

import time

import pytest

from harness import wording
from harness.history import History, pid_of
from harness.job import Job
from harness.stalls import debugged
from integration.jobs.test_stuck import STALLING, stalling

pytestmark = pytest.mark.forked

IDLE_S = 2.0
FLAGS = f"--idle-timeout {IDLE_S:g} --busy-warning 60 --busy-timeout 600"


def until_watched(training: Job, slot: int, seconds: float = 2.5 * IDLE_S) -> None:
    """Until the driver has been looking at this worker, as one that others wait for, for so long."""

    def long_enough() -> bool:
        looks = [
            record["at"]
            for record in training.records()
            for action in record.get("actions") or []
            if action["type"] == "ProbeWorkers" and slot in [w[1] for w in action["workers"]]
        ]
        return len(looks) > 1 and looks[-1] - looks[0] >= seconds

    training.until(long_enough, f"{seconds:g} s of looks at slot {slot}")


def let_end(training: Job) -> None:
    (training.folder / "go").touch()
    training.succeed()
    History(training).check()
    assert training.fences() == {}
    assert not [r for r in training.actions("ReportRecovery") if r["kind"] == "recovery"]


@pytest.mark.nightly
def test_a_worker_that_computes_writes_or_is_in_a_long_phase_is_not_idle(job):
    """An evaluation that is not marked as long on one rank, a checkpoint to a slow disk on another, and on the third
    one that is marked: it may even be idle. The fourth waits for all of them.
    """
    doing = {0: "work", 1: "write", 2: "evaluation"}
    stalls = (f"slot={slot},step=4,place=stepped,how={how},file=go" for slot, how in doing.items())
    training = stalling(job, 4, ";".join(stalls), FLAGS)
    training.wait_for(wording.KEEPS_OTHERS_WAITING_EVALUATION)
    marked_at = time.monotonic()
    for slot in (0, 1):
        until_watched(training, slot)
    training.until(lambda: time.monotonic() - marked_at > 2 * IDLE_S, "twice the limit")
    let_end(training)


def test_world_waits_for_a_late_worker_in_its_first_collective(job):
    """Longer than it takes ranks to connect: rank 0 may validate a restored model before it trains."""
    connecting = ["env", "HOROVOD_GLOO_TIMEOUT_SECONDS=2", *STALLING]  # of the workers only
    rule = {"STALL": "slot=0,place=enter,how=evaluation,file=go"}
    training = job(f"-np 3 --min-np 1 {FLAGS}", connecting, env={"ELASTIC_DIGESTS": "1", **rule})
    training.wait_for(wording.KEEPS_OTHERS_WAITING_EVALUATION)
    began = time.monotonic()
    training.until(lambda: time.monotonic() - began > 1.5 * IDLE_S, "more than the time to connect")
    worlds = len(training.worlds())
    let_end(training)
    assert len(training.worlds()) == worlds


@pytest.mark.nightly
def test_worker_held_by_a_debugger_is_not_fenced(job):
    training = stalling(job, 3, "slot=1,step=4,place=stepped,how=pause,file=go", "--idle-timeout 5")
    training.until((training.folder / "stalls.1").exists, "a worker that pauses")
    with debugged(pid_of(training, 1)):
        training.wait_for(wording.KEEPS_OTHERS_WAITING_UNDER)
        until_watched(training, 1, 6.0)
    let_end(training)


@pytest.mark.nightly
def test_slow_start_is_not_limited_by_stall_timeouts(job):
    """Imports and models take their time, while the others are ready. Its own limit is --start-timeout."""
    flags = "--lease 1 --idle-timeout 1 --busy-warning 1 --busy-timeout 2"
    training = stalling(job, 3, "slot=2,place=before init,how=pause,file=go", flags)
    training.until(lambda: len(training.events("WorkerReady")) == 2, "two that wait")
    began = time.monotonic()
    training.until(lambda: time.monotonic() - began > 4.0, "four seconds")
    let_end(training)
