"""Imports torch without its compiler, which the first optimizer would load, and which takes as long as the rest.

Nothing in these scripts is compiled. ``import light`` before anything makes an optimizer.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

torch.set_num_threads(1)


def same(function: Any, *_: Any, **__: Any) -> Any:
    return function


if "torch._dynamo" not in sys.modules:
    compiler = ModuleType("torch._dynamo")
    compiler.disable = same  # type: ignore[attr-defined]
    compiler.graph_break = lambda *_: None  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = compiler
    torch._dynamo = compiler
