"""Worlds for optimizers under test: of two ranks in one process, or with a thread for each rank."""

import pytest

from elastic.runtime import lifecycle
from harness.small_worlds import World, ranks_as_threads


@pytest.fixture
def world(monkeypatch):
    world = World(2)
    monkeypatch.setattr(lifecycle, "current", lambda: world)
    return world


@pytest.fixture
def threads(monkeypatch):
    return ranks_as_threads(monkeypatch)
