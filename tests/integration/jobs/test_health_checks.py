"""Health before admission, on two hosts: one that fails its check is in no world, and the others train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.driver.processes.orphan_reaper_program import state_of
from harness.history import TRAINING, History
from harness.job import Job

pytestmark = pytest.mark.forked

AWAY = "127.0.0.2"
HOSTS = f"-np 2 --min-np 1 -H localhost:1,{AWAY}:1 --network-interface lo"
AGAIN = "--blacklist-cooldown-range 0.2 0.5"


class Check:
    """A command that fails, or hangs, on one host until a file exists."""

    def __init__(self, folder: Path, otherwise: str) -> None:
        self.mended = folder / "mended"
        self.pids = folder / "pids"
        self.script = folder / "check.sh"
        here = f'[ "$ELASTIC_HOST:$ELASTIC_SLOT" = {AWAY}:0 ] && [ ! -e {self.mended} ]'
        self.script.write_text(f"#!/bin/sh\nif {here}; then {otherwise}; fi\necho sound\n")
        self.script.chmod(0o755)


def started(job: Callable[..., Job], flags: str, tmp_path: Path, **env: str) -> Job:
    training = job(
        f"{HOSTS} {AGAIN} {flags}",
        TRAINING,
        env={"ENDS": str(tmp_path / "end"), "PACE": "0.02"} | env,
    )
    training.until(lambda: len(results(training)) >= 3, "three results of the other host", 90.0)
    training.until(lambda: History(training).has("localhost:0#1", "step", step=5), "steps", 60.0)
    return training


def results(job: Job) -> list[dict]:
    """Return the results of the other host's checks."""
    return [e for e in job.events("WorkerHealthChecked") if e["worker"][0] == AWAY]


def only_the_first_trains(job: Job) -> None:
    """No world has a worker of the other host, and none was interrupted for one."""
    members = [each["worker"][0] for world in job.worlds() for each in world["members"]]
    assert set(members) == {"localhost"} and not job.actions("BreakWorld")
    assert not job.actions("PrepareChange")


def errors_about_health(job: Job) -> list[dict]:
    lines = [each for each in job.actions("Report") if each["level"] == "error"]
    return [each for each in lines if (each.get("about") or {}).get("kind") == "unhealthy"]


def test_host_with_a_failed_check_joins_once_the_check_passes(job, tmp_path):
    check = Check(tmp_path, 'echo "GPU 0 is off the bus"; exit 4')
    training = started(job, f"--health-check {check.script}", tmp_path)
    only_the_first_trains(training)
    for each in results(training):
        assert (each["outcome"], each["code"], each["line"]) == (
            "failed",
            4,
            "GPU 0 is off the bus",
        )
    assert len(errors_about_health(training)) == 1, "it is logged once"
    check.mended.touch()
    training.wait_for_world(2, 90.0)
    assert results(training)[-1]["outcome"] == "passed"
    (tmp_path / "end").touch()
    training.succeed()


def test_check_that_hangs_is_killed_with_its_children(job, tmp_path):
    check = Check(tmp_path, f"sleep 600 & echo $! >> {tmp_path / 'pids'}; echo waiting; wait")
    flags = f"--health-check {check.script} --health-check-timeout 0.5"
    training = started(job, flags, tmp_path)
    only_the_first_trains(training)
    assert {each["outcome"] for each in results(training)} == {"timed_out"}
    assert len(errors_about_health(training)) == 1
    (tmp_path / "end").touch()
    training.succeed()
    for pid in check.pids.read_text().split():
        assert state_of(int(pid))[0] in "ZX", "no process is left; its parent may not reap it"


def test_wrong_bit_in_the_built_in_check_keeps_a_host_out(job, tmp_path):
    training = started(
        job,
        "--health-check auto",
        tmp_path,
        ELASTIC_FAILPOINTS=f"health-check flip=product:77 host={AWAY}",
    )
    only_the_first_trains(training)
    assert {each["outcome"] for each in results(training)} == {"wrong_result"}
    passed = [e for e in training.events("WorkerHealthChecked") if e["worker"][0] == "localhost"]
    assert [each["outcome"] for each in passed] == ["passed"]
    (tmp_path / "end").touch()
    training.succeed()


def test_job_of_a_fixed_size_ends_with_the_failed_check(job, tmp_path):
    check = Check(tmp_path, "exit 1")
    ended = job(
        f"-np 2 -H localhost:1,{AWAY}:1 --network-interface lo --health-check {check.script}",
        TRAINING,
    )
    assert ended.wait() == 1
    [end] = ended.actions("EndJob")
    assert end["reason"]["kind"] == "unhealthy"
