"""Runs the functions of a module in the ranks of a world. Only the module imports a framework."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from typing import Any


def of(module: str) -> list[str]:
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
