"""The batch script of docs/slurm.md for one machine, on a real Slurm: it reaches its time limit, is preempted, or is
cancelled. It resumes, or is not started again.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.history import SCRIPTS
from harness.slurm import NEEDS_SLURM, Cluster, slurm

ROOT = Path(__file__).parents[3]
pytestmark = NEEDS_SLURM


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    host = socket.gethostname().partition(".")[0]
    with slurm(tmp_path_factory.mktemp("slurm"), [host], os.cpu_count() or 1) as here:
        yield here


def recipe(checkpoints: Path, limit: str) -> str:
    """That of the docs, of two workers."""
    page = (ROOT / "docs/slurm.md").read_text()
    _, script = re.findall(r"```\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    for old, new in (
        ("--time=4:00:00", f"--time={limit} --cpus-per-task={os.cpu_count()}"),
        ("-np 4", "-np 2"),
        ("/shared/bert", str(checkpoints)),
        ("train.py", str(SCRIPTS / "durable.py")),
    ):
        assert script.count(old) == 1, f"{old} in:\n{script}"
        script = script.replace(old, new)
    return str(script)


DURABLE = r"commit (\S+) is durable: rerun the same command to resume from it"


def goes_on_and_ends(cluster: Cluster, job: str, checkpoints: Path) -> None:
    commit = re.findall(DURABLE, cluster.until(job, DURABLE))[0]
    cluster.until(job, rf"training resumes from .*\b{re.escape(commit)}\b")
    cluster.until(job, "the same bits")
    (checkpoints / "enough").touch()
    cluster.until_state(job, "COMPLETED")


def test_job_at_its_time_limit_is_requeued_and_resumes(cluster, tmp_path):
    job = cluster.submit(recipe(tmp_path, "1:00"))
    goes_on_and_ends(cluster, job, tmp_path)


def test_preempted_job_resumes_after_the_job_of_higher_priority(cluster, tmp_path):
    job = cluster.submit(recipe(tmp_path, "20:00"))
    cluster.until(job, "rank 0 begins at 0")
    other = "#!/bin/bash\nsleep 1\n"
    cluster.submit(other, "--partition=high", f"--cpus-per-task={os.cpu_count()}", "--time=1")
    goes_on_and_ends(cluster, job, tmp_path)


@pytest.mark.parametrize("fixed", [False, True], ids=["elastic", "fixed"])
def test_cancelled_job_keeps_a_last_commit_and_is_not_requeued(
    cluster, tmp_path, monkeypatch, fixed
):
    """Its loader workers get the signal too."""
    script, elastic = recipe(tmp_path, "20:00"), " --min-np 1"
    assert script.count(elastic) == 1
    monkeypatch.setitem(cluster.environ, "LOADERS", "1")
    job = cluster.submit(script.replace(elastic, "") if fixed else script)
    cluster.until(job, "rank 0 begins at 0")
    cluster.run("scancel", job)
    cluster.until(job, DURABLE)
    cluster.until_state(job, "CANCELLED")
    assert cluster.run("squeue", "--noheader", "--jobs", job) == ""
