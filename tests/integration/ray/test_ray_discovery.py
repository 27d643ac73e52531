"""Hosts of a real Ray cluster: nodes that join, drain and die, a missing head, and no leaks."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from harness import wording
from harness.history import SCRIPTS
from harness.ray_cluster import RayCluster, RayJob

pytestmark = pytest.mark.ray

SCRIPT = SCRIPTS / "ray_hosts.py"
ONE = {"CPU": 1}


@pytest.fixture
def cluster(with_redis: RayCluster) -> RayCluster:
    return with_redis


class Watched(RayJob):
    """A job without workers: the lists of hosts it is given. ``known`` counts those that were read."""

    def __init__(self, cluster: RayCluster, job: str, **plan: Any) -> None:
        plan = {"resources": ONE, **plan}
        super().__init__(cluster, SCRIPT, job, json.dumps(plan))
        self.cluster = cluster
        self.known = 0

    def next(self) -> dict[str, int]:
        """The next list: node and slots."""
        self.known += 1
        match = self.wait_for(r"^hosts (.*)", 30, count=self.known)
        self.rows = json.loads(match[1])
        return {node: slots for _, slots, _, node in self.rows}

    def until_listed(self, hosts: dict[str, int]) -> None:
        """Waits for this list, in whatever order. Those before it hold a part of it, so nothing flaps."""
        while (now := self.next()) != hosts:
            assert all(slots <= hosts.get(node, 0) for node, slots in now.items()), now

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.succeed(20)


@contextlib.contextmanager
def watched(cluster: RayCluster, job: str, **plan: Any) -> Iterator[Watched]:
    running = Watched(cluster, job, **plan)
    try:
        yield running
    finally:
        running.end()


def claims(cluster: RayCluster) -> dict[str, str]:
    """The claims that were not removed, and the nodes they are placed on."""
    return {
        group["name"].rpartition(":")[2]: "".join(filter(None, group["nodes"]))
        for group in cluster.placement_groups()
        if group["name"].startswith("hvd-elastic:")
    }


def test_claims_follow_nodes_that_join_drain_and_die(cluster):
    first, second = cluster.started
    with watched(cluster, "story", most=4, at_least=4) as job:
        job.until_listed({first: 2, second: 2})
        assert {host.rpartition("-")[2] for host, *_ in job.rows} == {first[:8], second[:8]}
        assert sorted(claims(cluster)) == ["0", "1", "2", "3"]
        # On a node that drains they are given up, and others are asked for at once.
        assert cluster.drain(first)
        job.until_listed({second: 2})
        cluster.until(lambda: first not in claims(cluster).values(), "its claims to be removed")
        left = claims(cluster)
        assert sorted(left.values()) == ["", "", second, second]
        assert {number for number, node in left.items() if not node} == {"4", "5"}
        job.wait_for(wording.LOG_INFO_DRAINS_WORKERS % (first[:8],))
        # Those that wait are placed on a node that comes.
        third = cluster.add(num_cpus=2)
        job.until_listed({second: 2, third: 2})
        # Those of a node that dies are the same ones afterwards: Ray places them elsewhere.
        cluster.kill(third)
        job.until_listed({second: 2})
        fourth = cluster.add(num_cpus=2)
        job.until_listed({second: 2, fourth: 2})
        assert claims(cluster).keys() == left.keys()
        job.close()
    assert cluster.placement_groups() == []
    assert not [line for line in job.lines if line.startswith("log warning")]


def test_gpus_are_reported_for_each_slot(cluster):
    node = cluster.started[1]
    with watched(cluster, "gpus", most=2, resources={"CPU": 1, "GPU": 1}, at_least=2) as job:
        job.until_listed({node: 2})
        [[_, _, gpus, _]] = job.rows
        assert sorted(gpus) == ["0", "1"]
        job.close()
    assert cluster.placement_groups() == []


def test_next_driver_reuses_the_placement_groups_of_a_killed_driver(cluster):
    """They are as many as before, and the same."""
    with watched(cluster, "again", most=2, at_least=2, detached=True) as job:
        hosts = job.next()
        before = claims(cluster)
        assert len(before) == 2
        job.process.kill()
        cluster.until(lambda: cluster.jobs() == [], "the end of the Ray job")
    assert claims(cluster) == before
    with watched(cluster, "again", most=2, detached=True) as job:
        assert job.next() == hosts
        assert claims(cluster) == before
        job.close()
    assert cluster.placement_groups() == []


def test_job_without_room_is_refused_with_the_free_resources(cluster):
    with watched(cluster, "large", most=2, at_least=1, resources={"CPU": 64}, within_s=1) as job:
        said = job.wait_for("^refused: (.*)")[1]
        job.succeed()
    assert said.startswith(wording.WORKER_CPU_ASKED_COULD)
    assert wording.NO_NODE_LARGE_ENOUGH in said
    assert cluster.placement_groups() == []


def test_the_bundles_of_a_given_group_are_slots_and_the_group_stays(cluster):
    bundles = [ONE, ONE, {"CPU": 0.5}, ONE]
    with watched(cluster, "given", most=9, at_least=2, bundles=bundles, in_use={"0": ONE}) as job:
        assert sum(job.next().values()) == 2
        assert claims(cluster) == {}
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("^group CREATED")
        job.succeed()


def test_head_outage_keeps_the_hosts_and_placement_groups_end_with_their_ray_job(cluster):
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server; apt-get install redis-server")
    with watched(cluster, "away", most=2, at_least=2, answer_s=0.5) as job:
        job.next()
        before = claims(cluster)
        assert len(before) == 2
        cluster.kill_gcs()
        job.wait_for(wording.LOG_WARNING_RAY_DOES)
        cluster.start_gcs()
        job.wait_for(wording.LOG_INFO_RAY_ANSWERS)
        assert claims(cluster) == before
        assert len([line for line in job.lines if line.startswith("hosts ")]) == job.known == 1
        job.process.kill()
        cluster.until(lambda: cluster.placement_groups() == [], "the end of the claims")
