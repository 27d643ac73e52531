"""Clusters that modules share: the start of one costs ten seconds. `harness.spread` keeps those modules in one process,
one after another.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from harness.ray_cluster import RayCluster, ray_nodes

# Ray takes a node for dead after 15 s otherwise.
SOON = {"health_check_period_ms": 200, "health_check_failure_threshold": 3}

_running: dict[str, AbstractContextManager[RayCluster]] = {}


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> RayCluster:
    """Of `test_horovod_ray`; then of `test_ray_dead_node`, in which a node dies. Ray notices it after 15 s."""
    nodes = [{"num_cpus": 1}, {"num_cpus": 2}]
    return _started("two_nodes", tmp_path_factory, nodes)


@pytest.fixture(scope="session")
def with_redis(tmp_path_factory: pytest.TempPathFactory) -> RayCluster:
    """Of `test_ray_agents`, `test_ray_discovery` and `test_ray_journal`. Its GCS may be away, where there is redis. Two
    nodes with two CPUs; the second, which has two GPUs as well, is there in every test.
    """
    redis = shutil.which("redis-server") is not None
    nodes = [{"num_cpus": 2}, {"num_cpus": 2, "num_gpus": 2}]
    return _started("with_redis", tmp_path_factory, nodes, redis=redis, system=SOON)


def _started(
    name: str, folders: pytest.TempPathFactory, nodes: Sequence[Mapping[str, Any]], **settings: Any
) -> RayCluster:
    _running[name] = ray_nodes(folders.mktemp("ray"), nodes, **settings)
    return _running[name].__enter__()


@pytest.hookimpl(trylast=True)  # when the test's own fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A cluster ends with the last test that wants it, and not with the run: it has work to do while it is idle."""
    for name in _running.keys() - getattr(nextitem, "fixturenames", ()):
        _running.pop(name).__exit__(None, None, None)
