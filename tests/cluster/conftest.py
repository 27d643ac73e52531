"""One control plane for a run of the tests, a namespace and nodes for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.api import Namespace
from cluster.control_plane import ControlPlane, Node, missing
from cluster.release import IMAGE, Release


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/dev/shm"))
    plane = ControlPlane(folder)
    try:
        plane.start()
        yield plane
    finally:
        plane.close()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[Namespace]:
    with control_plane.namespace() as found:
        yield found


@pytest.fixture
def add_node(control_plane: ControlPlane) -> Iterator[Callable[..., Node]]:
    """``add_node(heartless=True)`` and so on, as `ControlPlane.add_node`; it is removed after the test."""
    added: list[Node] = []

    def add(**options: Any) -> Node:
        added.append(control_plane.add_node(**options))
        return added[-1]

    yield add
    for node in added:
        node.remove()


@pytest.fixture
def node(add_node: Callable[..., Node]) -> Node:
    """A ready node."""
    return add_node()


@pytest.fixture
def release(control_plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> Iterator[Release]:
    folder = tmp_path / "steps"
    folder.mkdir()
    found = Release(control_plane, namespace, folder)
    yield found
    (folder / "stop").touch()


@pytest.fixture
def nodes(add_node: Callable[..., Node]) -> list[Node]:
    return [add_node(environment=IMAGE), add_node(environment=IMAGE)]
