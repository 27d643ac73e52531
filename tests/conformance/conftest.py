"""One world per size for all tests of this folder: pytest runs those of one size together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.worlds import World


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()
