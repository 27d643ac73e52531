"""An agent is started on a node of a real Ray cluster that has died, before Ray notices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.history import SCRIPTS
from harness.ray_cluster import RayCluster, RayJob

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(180)]
WAIT_S = 120.0


def test_dead_node_reported_alive_by_ray_fails_a_start_in_time_without_blocking(
    two_nodes: RayCluster, tmp_path: Path
):
    job = RayJob(two_nodes, SCRIPTS / "ray_agents.py", str(tmp_path), "dead-node")
    try:
        found = json.loads(job.wait_for(r"^node-died (\{.*)", WAIT_S)[1])
        job.succeed(WAIT_S)
    finally:
        left = job.end()
    assert not left, f"these processes outlived the program: {left}"
    assert found["agents"] == 1 and found["took_s"] < 20.0
    assert "right" in found["why"] and found["failed_s"] < 20.0
    assert found["lag_s"] < 2.5  # the start has 3 s
    gone = "warning: Ray's raylet on right is gone, and the agent exited with it"
    assert gone in found["log"]
    assert "AgentActor" not in {actor["class"] for actor in two_nodes.actors()}
