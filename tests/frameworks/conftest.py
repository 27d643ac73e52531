"""Tests of the APIs for TensorFlow, Keras and MXNet. Ranks import the frameworks; pytest's process never does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from conformance.worlds import shared_worlds

world, pytest_runtest_teardown = shared_worlds(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    for name in getattr(request.module, "NEEDS", ("tensorflow", "keras")):
        if importlib.util.find_spec(name) is None:
            how = "make mxnet" if name == "mxnet" else "pip install 'hvd-elastic[frameworks]'"
            pytest.skip(f"needs {name}: {how}")
