"""Members' reports of their progress in the driver's journal: waits, their lines and their ends."""

from __future__ import annotations

import pytest

from harness.history import RETURN, SCRIPTS, History
from harness.job import Job, Json

pytestmark = pytest.mark.forked

LOSS = "allreduce.loss"


def stalling(job, stall: str, flags: str, **env: str) -> Job:
    command = ["python", SCRIPTS / "stalling.py"]
    env = {"ELASTIC_DIGESTS": "1", "STALL": f"place=optimizer,how=pause,file=go,{stall}"} | env
    training: Job = job(f"-np 3 --min-np 1 {flags}", command, env=env)
    return training


def waits(training: Job) -> dict[int, Json]:
    """By slot, the last word of a wait in the collective after the pause."""
    said = training.events("WorkerProgressed")
    return {event["worker"][1]: event for event in said if event.get("inside") == LOSS}


def test_waiting_workers_report_the_collective_and_its_end(job):
    training = stalling(job, "slot=1,step=4", "--blacklist-cooldown-range 60 60")
    training.until(lambda: waits(training).keys() == {0, 2}, "two that wait")
    assert all(event["waited_s"] >= 1.0 for event in waits(training).values())
    (training.folder / "go").touch()
    training.succeed()
    for slot in (0, 2):
        said = [e for e in training.events("WorkerProgressed") if e["worker"][1] == slot]
        last = max(n for n, event in enumerate(said) if event.get("inside") == LOSS)
        assert any(event.get("inside", "") != LOSS for event in said[last + 1 :]), said
    History(training).check()


def test_worker_that_copied_state_to_a_joining_one_counts_collectives_like_its_peers(job):
    """Else two that wait in the same collective would look as if they were in different ones."""
    training = stalling(
        job, "slot=2,start=2,step=6", RETURN, DIE="slot=2,step=3,place=stepped", HOLD="5:size=3"
    )
    training.until(lambda: waits(training).keys() >= {0, 1}, "two that wait", 60.0)
    copied = [event for event in training.events("WorkerResumed") if event.get("copied_bytes")]
    assert copied, "nobody's state was copied"
    first, second = (waits(training)[slot] for slot in (0, 1))
    assert first["generation"] == second["generation"]
    assert first["entered"] == second["entered"] > 0
    (training.folder / "go").touch()
    training.succeed()
    History(training).check()
