"""Tests of the doors for TensorFlow and Keras. Their ranks import the frameworks; the process of pytest never does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from conformance.worlds import shared_worlds

world, pytest_runtest_teardown = shared_worlds(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _installed() -> None:
    for name in ("tensorflow", "keras"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install 'hvd-elastic[frameworks]', as make test does")
