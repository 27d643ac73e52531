"""horovod.ray on a real cluster of two nodes: every public method, with real workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.history import SCRIPTS
from harness.ray_cluster import RayCluster, RayJob

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCRIPT = SCRIPTS / "horovod_ray_calls.py"
LONG_S = 110.0


@pytest.fixture
def cluster(two_nodes: RayCluster) -> RayCluster:
    return two_nodes


def told(cluster: RayCluster, *arguments: str, **settings: Any) -> dict[str, list[Any]]:
    """Return the output of this part of the script, by kind, in order. It leaves nothing in the cluster."""
    job = RayJob(cluster, SCRIPT, *arguments, **settings)
    try:
        job.succeed(LONG_S)
    finally:
        left = job.end()
    assert not left
    cluster.until(lambda: not cluster.placement_groups(), "placement groups to be removed")
    cluster.until(
        lambda: not {each["class"] for each in cluster.actors()} & {"DriverActor", "AgentActor"},
        "actors to be gone",
    )
    found: dict[str, list[Any]] = {}
    for line in job.lines:
        kind, _, text = line.partition(" ")
        if text[:1] in ("[", "{") or text.isdecimal():
            found.setdefault(kind, []).append(json.loads(text))
    return found


def trained(value: int, size: int = 2) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "size": size, "value": value, "sum": float(size)} for rank in range(size)
    ]


@pytest.mark.nightly
def test_static_executor_runs_on_exactly_two_hosts(cluster):
    said = told(cluster, "static")
    assert said["free"] == [1, 3]  # while it runs, and afterwards
    assert said["execute"] == [trained(8), trained(9)]
    assert said["heard"] == [[{"rank": 0, "value": 8}, {"rank": 1, "value": 8}]]
    assert said["single"] == [9]
    assert said["run"] == [[[0, 2, 2, "7"], [1, 2, 2, "7"]]] * 2
    assert said["remote"] == [[[1, 2]] * 2]
    [[kind, text, cause]] = said["raised"]
    assert (kind, text) == ("KeyError", "'rank 1 has lost its data'")
    assert "on rank 1" in cause
    assert "in fail_on" in cause
    assert said["again"] == [trained(10), [[0, 2, 2, "7"], [1, 2, 2, "7"]]]
    assert said["exit"][0][0] == "RaisedOnWorker"
    assert "SystemExit: 3" in said["exit"][0][1]
    assert said["object"][0][0] == "AttributeError"
    for kind, text, _ in [*said["died"], *said["after"]]:
        assert kind == "JobFailed"
        assert "exit code 9" in text
    [[kind, text, _]] = said["no"]
    assert kind == "PlacementTimeout"
    assert "3" in text
    assert said["group"] == [[2, [[0, 2], [1, 2]]]]
    assert said["worker"] == [
        {"environ": ["1", None, "1", "2"], "known": True, "gpus": [], "host": True, "value": 2}
    ]


@pytest.mark.nightly
def test_elastic_executor_uses_all_free_slots(cluster):
    """Three workers on two hosts; the value is rank 0's."""
    assert told(cluster, "free")["single"] == [[5, 0, 3, 2, "7"]]


@pytest.mark.nightly
def test_elastic_executor_runs_and_reports(cluster):
    said = told(cluster, "elastic")
    [first, second] = said["run"][0]
    assert [first[0], second[0]] == trained(6)
    assert [first[1][:2], second[1][:2]] == [[0, 2], [1, 2]]
    assert first[1][3] == second[1][3] == "8"
    assert said["heard"] == [[{"rank": 0, "value": 6}, {"rank": 1, "value": 6}]]


@pytest.mark.nightly
def test_horovod_trainer_of_ray_train_runs(cluster, tmp_path):
    said = told(cluster, "trainer", str(tmp_path), env={"RAY_TRAIN_V2_ENABLED": "0"})
    assert said["trainer"] == trained(6)[:1]
