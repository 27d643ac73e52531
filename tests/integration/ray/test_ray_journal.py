"""A job's journal in the key-value store of a real Ray cluster: drivers that are killed, replaced, and cut off."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Iterator

import pytest

from harness import wording
from harness.history import SCRIPTS
from harness.ray_cluster import RayCluster, RayJob

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

WRITER = SCRIPTS / "ray_journal_writer.py"
SETTLED = r"^settled (\d+) (\d+)$"
FOUND = r"^found (\d+) term (\d+) digest (\d+)$"
REDIS = shutil.which("redis-server") is not None


@pytest.fixture
def cluster(with_redis: RayCluster) -> RayCluster:
    return with_redis


@contextlib.contextmanager
def driver(cluster: RayCluster, *task: str) -> Iterator[RayJob]:
    job = RayJob(cluster, WRITER, "night", *task)
    try:
        yield job
    finally:
        job.end()


def settled(job: RayJob) -> dict[int, str]:
    """Return what it was allowed to act upon, and its state after that."""
    found = (re.match(SETTLED, line) for line in job.lines)
    return {int(match[1]): match[2] for match in found if match}


def check_goes_on(job: RayJob, before: RayJob, term: int) -> None:
    """It has all that the previous driver was allowed to act upon, and at most the entry that was being written."""
    number, last_term, digest = job.wait_for(FOUND).groups()
    states = settled(before)
    assert int(last_term) == term and int(number) - max(states) in (0, 1)
    assert states.get(int(number), digest) == digest


def test_successor_driver_reads_the_journal_of_its_predecessor(cluster):
    """One is killed; the next is only disconnected and continues to write; then the head's service restarts."""
    with driver(cluster) as first:
        first.wait_for(SETTLED, count=100)  # with two snapshots
        first.process.send_signal(signal.SIGKILL)
        first.wait()
    with driver(cluster) as second:
        check_goes_on(second, first, term=1)
        second.wait_for(SETTLED, count=10)
        with driver(cluster) as third:
            third.wait_for(SETTLED)
            second.wait_for(wording.LOG_WARNING_ANOTHER_DRIVER)
            second.wait_for(r"^deposed \d+$")
            assert second.wait() == 0
            check_goes_on(third, second, term=2)
            if REDIS:
                cluster.restart_gcs()
                third.wait_for(SETTLED, count=len(settled(third)) + 50)
            third.process.send_signal(signal.SIGKILL)
            third.wait()
    with driver(cluster, "forget") as last:
        check_goes_on(last, third, term=3)
        last.wait_for("^left None$")
        assert last.wait() == 0
