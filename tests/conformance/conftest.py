"""One world per size for all tests of this folder: pytest runs those of one size together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.worlds import World

_open: list[World] = []


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    _open.append(world)
    yield world
    world.close()
    _open.remove(world)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the folder's last test: other tests count the children of this process."""
    here = Path(__file__).parent
    if nextitem is None or here not in nextitem.path.parents:
        for world in _open:
            world.close()
