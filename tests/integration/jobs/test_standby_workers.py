"""`--standbys`: a worker beyond the largest world takes the place of one that is killed. Real processes."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from elastic.protocol.messages import Worker
from harness import wording
from harness.history import SCRIPTS
from harness.job import Job
from harness.waiting import wait_until

pytestmark = pytest.mark.forked

TRAINING = ["python", str(SCRIPTS / "spending.py")]
FLAGS = "-np 2 --min-np 1 --max-np 2 --standbys 1 --blacklist-cooldown-range 0.1 0.2"


def members(training: Job) -> list[str]:
    return [str(Worker(*member["worker"])) for member in training.worlds()[-1]["members"]]


def until_all_train(training: Job) -> None:
    def found() -> bool:
        last = training.worlds()[-1]["generation"] if training.worlds() else 0
        resumed = [e for e in training.events("WorkerResumed") if e["generation"] == last]
        return len(resumed) == 2

    training.until(found, "two workers that train")


def test_standby_replaces_a_killed_worker_and_the_next_standby_follows(job, tmp_path):
    training = job(FLAGS, TRAINING, env={"ELASTIC_TEST_FOLDER": str(tmp_path)})
    training.wait_for(wording.STANDBY_READY % "localhost:2#1")
    assert members(training) == ["localhost:0#1", "localhost:1#1"]
    until_all_train(training)
    training.kill(1)
    training.wait_for(wording.RECOVERED_WORKERS_GENERATION_2)
    assert members(training) == ["localhost:0#1", "localhost:2#1"]
    [recovered] = [r for r in training.actions("ReportRecovery") if r["kind"] == "recovery"]
    assert recovered["phases_ms"]["waited"] <= recovered["total_ms"]  # not since it stood by
    training.wait_for(wording.STANDBY_READY % "localhost:1#2")
    training.kill(0)  # the one that has been there from the beginning: the other holds the state
    training.wait_for(wording.RECOVERED_WORKERS_GENERATION_3)
    assert members(training) == ["localhost:2#1", "localhost:1#2"]
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0


def test_standby_that_was_stopped_a_moment_ago_is_not_taken(job, tmp_path):
    """Its agent checks four times a second; a member dies before that."""
    training = job(FLAGS, TRAINING, env={"ELASTIC_TEST_FOLDER": str(tmp_path)})
    training.wait_for(wording.STANDBY_READY % "localhost:2#1")
    until_all_train(training)
    member = training.pid(1)
    standby = psutil.Process(pid_of(training, "localhost:2#1"))
    standby.suspend()
    wait_until(lambda: standby.status() == psutil.STATUS_STOPPED, "it has stopped")
    os.kill(member, signal.SIGKILL)
    training.until(lambda: training.worlds()[-1]["generation"] >= 3, "the next world")
    assert members(training) == ["localhost:0#1"]
    training.until(lambda: training.fences().get(2), "it is fenced, and not before")
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0


def pid_of(training: Job, name: str) -> int:
    [pid] = [
        event["pid"]
        for event in training.events("WorkerConnected")
        if str(Worker(*event["worker"])) == name
    ]
    return int(pid)


def test_a_killed_standby_disturbs_no_worker(job, tmp_path):
    training = job(FLAGS, TRAINING, env={"ELASTIC_TEST_FOLDER": str(tmp_path)})
    training.wait_for(wording.STANDBY_READY % "localhost:2#1")
    os.kill(pid_of(training, "localhost:2#1"), signal.SIGKILL)
    training.wait_for(wording.STANDBY_READY % "localhost:2#2")
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0
    assert [world["generation"] for world in training.worlds()] == [1, 2]
    assert not training.actions("BreakWorld") and not training.actions("PrepareChange")
    # Those that wait do so for nobody: what they say of their time is that they were idle.
    idle = [
        event["times"]
        for event in training.events("WorkerSpent")
        if str(Worker(*event["worker"])) == "localhost:2#2"
    ]
    assert idle[-1][-1] > 0
