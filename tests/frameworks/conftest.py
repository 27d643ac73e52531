"""Tests of the doors for TensorFlow and Keras. Their ranks import the frameworks; the process of pytest never does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.worlds import World

_open: list[World] = []


@pytest.fixture(autouse=True)
def _installed() -> None:
    for name in ("tensorflow", "keras"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install 'hvd-elastic[frameworks]', as make test does")


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
