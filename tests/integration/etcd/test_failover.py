"""A killed driver: training continues without it, and the next driver takes over."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from harness import wording
from harness.history import RETURN, TRAINING, History, pid_of, sizes
from harness.job import Job, elasticrun, split
from harness.waiting import wait_until

HOSTS = "-H localhost:1,127.0.0.2:1 -np 2 --min-np 1 --resume"


@pytest.fixture
def drivers(tmp_path):
    """Starts one driver of a job after the other, in one folder."""
    started: list[Job] = []

    def start(**env: str) -> Job:
        told = {"ELASTIC_DIGESTS": "1", "STEPS": "30"} | env
        command = [*map(str, TRAINING)]
        flags = f"{HOSTS} {RETURN}"
        started.append(Job(flags, command, folder=tmp_path, env=told, forked=True))
        return started[-1]

    yield start
    # The last one has ended the job: nobody of it may be left.
    left = [process for each in reversed(started) for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"
    started[-1].check_invariants()


def refused(folder: Path, flags: str) -> str:
    """Return the output of a driver that must not begin."""
    journal = ["--journal", str(folder / "journal.jsonl")]
    command = [elasticrun(), *split(flags), *journal, *map(str, TRAINING)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, "one sentence"
    return done.stderr


def killed(driver: Job) -> None:
    os.kill(driver.driver.pid, signal.SIGKILL)
    driver.driver.wait(10)


def steps(driver: Job) -> int:
    """All workers' together."""
    return len(History(driver).all("step"))


def test_training_continues_without_its_driver_until_the_successor_takes_over(drivers, tmp_path):
    held = {"HOLD": "5:file=alone;500:file=go", "STEPS": "520"}
    first = drivers(**held)
    first.wait_for("starting 2 workers")
    said = refused(tmp_path, f"{HOSTS} {RETURN}")
    assert (wording.DRIVER_PROCESS_NUMBER_WRITES % first.driver.pid) in said

    first.until(lambda: steps(first) > 4, "the first steps")
    killed(first)
    before = steps(first)
    (tmp_path / "alone").touch()
    wait_until(lambda: steps(first) > before, "a step without a driver")
    said = refused(tmp_path, f"{HOSTS} {RETURN} --max-np 5 --reset-limit 3")
    assert wording.MAX_NP_JOB_BEGAN in said
    assert wording.RESET_LIMIT_JOB_BEGAN in said

    second = drivers(**held)
    second.wait_for(wording.GOES_JOB_AT_GENERATION)
    second.until(lambda: len(second.events("WorkerReconnected")) == 2, "both workers")
    (tmp_path / "go").touch()
    second.succeed()
    assert second.actions("BreakWorld") == [], "not one step failed"
    assert sizes(second) == [2, 2]
    History(second).check(steps=520)

    third = drivers()
    third.succeed()
    third.wait_for(wording.JOB_ENDED_EXIT_CODE)

    secret = (tmp_path / "journal.jsonl.secret").read_text().strip()
    assert len(secret) == 64
    told = "".join([(tmp_path / "journal.jsonl").read_text(), first.output, second.output])
    assert secret not in told


def test_worker_exit_during_the_absence_of_a_driver_is_handled_by_the_successor(drivers, tmp_path):
    first = drivers(HOLD="10:file=go;20:size=2")
    first.until(lambda: steps(first) > 4, "the first steps")
    secret = (tmp_path / "journal.jsonl.secret").read_text().strip()
    for process in first.processes():
        assert secret not in " ".join(process.info["cmdline"])
    victim = pid_of(first, 0, "127.0.0.2")
    killed(first)
    os.kill(victim, signal.SIGKILL)
    second = drivers()
    second.wait_for_action("BreakWorld")
    second.until(lambda: bool(second.events("WorkerExited")), "the word of its exit")
    [exited] = second.events("WorkerExited")
    assert (exited["worker"], exited["code"]) == (["127.0.0.2", 0, 1], -9)
    assert not exited.get("reason"), "as it was, and not as a guess"
    (tmp_path / "go").touch()
    second.succeed()
    assert sizes(second) == [2, 2, 1, 2], "and its slot was used again"
    History(second).check(steps=30)


def test_workers_of_a_killed_agent_end_and_are_replaced(drivers, tmp_path):
    driver = drivers(HOLD="10:file=go;20:size=2")
    driver.until(lambda: steps(driver) > 4, "the first steps")
    psutil.Process(psutil.Process(pid_of(driver, 0, "127.0.0.2")).ppid()).kill()
    driver.wait_for(wording.LOST_HOST_AGENT_NOT)
    (tmp_path / "go").touch()
    driver.wait_for(wording.NEW_AGENT_WORKERS_ONE)
    driver.succeed()
    assert sizes(driver) == [2, 2, 1, 2]
    History(driver).check(steps=30)
