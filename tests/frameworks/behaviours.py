"""Tests of the functions of a module, in the ranks of a world. Only the module imports a framework."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.worlds import World

FIRST_S = 150.0  # imports included
OFTEN_TWO = (2, pytest.param(3, marks=pytest.mark.nightly))  # sizes of worlds


def of_module(
    module: str, sizes: Sequence[Any] = OFTEN_TWO, quick: Collection[str] | None = None
) -> Callable[[World, str], None]:
    """Return a test that runs each function of a module on every rank of worlds of these sizes.

    Args:
        quick: functions that do not only run at night; by default all.
    """
    cases = [
        each if quick is None or each in quick else pytest.param(each, marks=pytest.mark.nightly)
        for each in names_of(module)
    ]

    @pytest.mark.parametrize("world", sizes, indirect=True, ids="{}-ranks".format)
    @pytest.mark.parametrize("behaviour", cases)
    def test(world: World, behaviour: str) -> None:
        world.run(call, module, behaviour, timeout_s=FIRST_S)

    return test


def names_of(module: str) -> list[str]:
    """Return the names of its functions that begin with ``test_``, in order."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def call(rank: int, size: int, module: str, name: str) -> Any:
    """In a rank's process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    frameworks = {"in_mxnet": "mxnet", "in_jax": "jax", "in_jax_script_checks": "jax"}
    framework = frameworks.get(module, "tensorflow")
    importlib.import_module(framework)
    found = importlib.import_module(f"frameworks.{module}")
    return getattr(found, name)(rank, size)
