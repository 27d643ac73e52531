"""An elastic job on a Ray cluster of three nodes that die, join, are drained, and whose head loses its GCS."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import psutil
import pytest

from harness.ray_cluster import RayCluster, ray_nodes
from harness.ray_stepping import Stepping
from harness.step_lines import committed_lost, repeated

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(300)]

NODES = 3
KILLS = 4
# There are always some to be placed: a node that comes gets a worker at once, and not when Ray has given up another.
PLACES = NODES + KILLS + 1
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray")
    redis = shutil.which("redis-server") is not None
    with ray_nodes(folder, [{"num_cpus": 1}] * NODES, redis=redis) as running:
        yield running


@pytest.fixture(scope="module")
def training(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepping]:
    """One job for all tests: each begins with a worker on each of at least three nodes."""
    stepping = Stepping.elastic(cluster, tmp_path_factory.mktemp("job"), NODES, PLACES)
    try:
        yield stepping
        stepping.finish()
        # Nothing is lost by any fault, in whatever order they came.
        assert committed_lost(stepping.steps()) == 0
        cluster.until(lambda: not cluster.actors(), "no actors")
        cluster.until(lambda: not cluster.placement_groups(), "no placement groups")
        # Counted at each look: a node that drains may be alive now and gone a moment later.
        cluster.until(
            lambda: cluster.available().get("CPU") == float(len(cluster.alive())),
            "all CPUs to be free",
        )
        left = {step.pid for step in stepping.steps() if psutil.pid_exists(step.pid)}
        assert not left, f"these workers outlived their job: {left}"
    finally:
        outlived = stepping.job.end()
    assert not outlived


def full(training: Stepping) -> dict[int, str]:
    """A world on all nodes, at least three; where its processes run."""
    while len(usable(training.cluster)) < NODES:
        training.cluster.add(num_cpus=1)
    world = training.world(len(usable(training.cluster)))
    return {step.pid: training.node_of(step.pid) for step in world}


def usable(cluster: RayCluster) -> list[str]:
    """Return the nodes where workers can stay."""
    nodes = [node for node in cluster.nodes() if node["runs"] and not node["head"]]
    return [node["node"] for node in nodes if not node["draining"]]


def test_training_loses_no_commit_when_nodes_are_killed_and_replaced(
    cluster: RayCluster, training: Stepping
):
    for round_ in range(KILLS):
        places = full(training)
        victim = sorted(places)[round_ % len(places)]
        before = time.monotonic()
        if round_ % 2:
            cluster.kill_raylet(places[victim])
        else:
            cluster.kill(places[victim])
        training.later(before, places.keys() - {victim})
        training.gone(victim)
        assert committed_lost(training.steps()) == 0


def test_a_node_joins_and_its_worker_trains_in_the_same_processes(
    cluster: RayCluster, training: Stepping
):
    places = full(training)
    began = training.steps()
    added = cluster.add(num_cpus=1)
    members = {step.pid for step in training.world(len(places) + 1)}
    (new,) = members - places.keys()
    assert places.keys() < members
    assert new in cluster.processes(added)
    assert repeated(training.steps()) == repeated(began)


def test_worker_of_a_drained_node_leaves_at_a_commit(cluster: RayCluster, training: Stepping):
    places = full(training)
    victim = max(places)
    began, before = training.steps(), time.monotonic()
    assert cluster.drain(places[victim], DEADLINE_S)
    training.gone(victim)
    training.later(time.monotonic(), places.keys() - {victim})
    assert time.monotonic() - before < DEADLINE_S / 2
    generation, left_at = training.steps()[-1].generation, time.monotonic()
    # Nothing of the job holds the node: Ray ends its raylet long before the deadline, and nobody notices.
    cluster.until(lambda: places[victim] not in cluster.alive(), "the node to end", DEADLINE_S / 2)
    training.later(left_at, places.keys() - {victim}, count=50)
    assert training.steps()[-1].generation == generation
    assert repeated(training.steps()) == repeated(began)
    assert committed_lost(training.steps()) == 0


@pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server")
def test_training_without_the_gcs_continues_and_survives_the_loss_of_a_node(
    cluster: RayCluster, training: Stepping
):
    places = full(training)
    began = training.steps()
    cluster.kill_gcs()
    training.later(time.monotonic(), set(places), count=100)
    assert training.steps()[-1].generation == began[-1].generation
    assert repeated(training.steps()) == repeated(began)
    victim, before = max(places), time.monotonic()
    cluster.kill(places[victim])
    training.later(before, places.keys() - {victim})
    cluster.start_gcs()
    training.later(time.monotonic(), places.keys() - {victim})
    cluster.add(num_cpus=1)
    members = {step.pid for step in training.world(len(places))}
    assert places.keys() - {victim} < members
    assert committed_lost(training.steps()) == 0
