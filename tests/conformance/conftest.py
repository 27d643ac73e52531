"""One world per size for all tests of this folder: pytest runs those of one size together."""

from pathlib import Path

from conformance.worlds import shared_worlds

world, pytest_runtest_teardown = shared_worlds(Path(__file__).parent)
