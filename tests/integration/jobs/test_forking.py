"""A job that is forked from a process that has imported torch is like any other: its workers are equal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import wording
from harness.history import SCRIPTS, TRAINING, History
from harness.job import Job

OWN_PROCESS = SCRIPTS / "own_process.py"
HOSTS = "-np 2 --min-np 1 -H localhost:1,127.0.0.2:1 --resume"


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(2)]


def is_a_fork(pid: int) -> bool:
    return b"forking.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_forked_worker_has_the_same_process_facts_as_a_started_one(tmp_path):
    found = {}
    for forked in (True, False):
        folder = tmp_path / str(forked) / "job"
        folder.mkdir(parents=True)
        job = Job("-np 2", ["python", OWN_PROCESS, "wait"], folder=folder, forked=forked)
        try:
            job.wait_for("wrote its facts", count=2)
            found[forked] = facts(folder)
            for told in found[forked]:
                assert told.pop("parent") == job.driver.pid
                del told["shown"]  # a fork's are those of its source, and marks
                assert is_a_fork(told["pid"]) == is_a_fork(job.driver.pid) == forked
            drawn = [number for told in found[forked] for number in told.pop("drawn")]
            assert len(set(drawn)) == len(drawn) == 4
            pids = {told.pop("pid") for told in found[forked]}
            assert pids == {event["pid"] for event in job.events("WorkerConnected")}
            assert pids | {job.driver.pid} <= {process.pid for process in job.processes()}
        finally:
            assert job.end() == []
    assert found[True] == found[False]


@pytest.mark.nightly
@pytest.mark.forked
def test_worker_is_started_normally_when_no_fork_is_left(job):
    """Two workers and what is spare are forks, those after them are not: the job does not notice."""
    failing = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 0.1 0.1 --slot-attempts 5",
        TRAINING,
        env={
            "ELASTIC_DIGESTS": "1",
            "RAISE": "slot=1,place=before run,error=value,start=any",
            "HOLD": "5:file=go",
        },
    )
    failing.wait_for(wording.SLOT_LOCALHOST_GIVEN_UP)
    (failing.folder / "go").touch()
    failing.succeed()
    History(failing).check()


@pytest.mark.forked
def test_exit_status_of_a_forked_driver_is_that_of_the_job(job):
    failing = job("-np 1", ["python", SCRIPTS / "plain.py", "0", "7"])
    assert failing.driver.poll() is None
    assert failing.wait() == 7 and failing.driver.poll() == 7


@pytest.mark.forked
def test_agents_and_their_workers_are_forks(job):
    waiting = job(HOSTS, ["python", OWN_PROCESS, "wait"])
    waiting.wait_for("wrote its facts", count=2)
    workers = [event["pid"] for event in waiting.events("WorkerConnected")]
    agents = {psutil.Process(pid).ppid() for pid in workers}
    assert len(agents) == 2 and waiting.driver.pid not in agents
    assert all(map(is_a_fork, [*workers, *agents]))


@pytest.mark.forked
def test_forks_die_with_their_driver(job):
    waiting = job("-np 2", ["python", OWN_PROCESS, "wait"])
    waiting.wait_for("wrote its facts", count=2)
    assert len(waiting.processes()) > 2
    os.kill(waiting.driver.pid, signal.SIGKILL)
    assert waiting.wait() == -signal.SIGKILL
