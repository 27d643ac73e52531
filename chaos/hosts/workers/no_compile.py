"""Keeps torch's compiler out of scripts that compile nothing.

The first optimizer would import it, which takes as long as the rest of torch. For scripts that are started very often;
call it before an optimizer is created.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def without_compiler() -> None:
    """Replace the compiler's module by one with the parts that torch uses: two no-op decorators and a few functions."""

    def same(function: Any, *_: Any, **__: Any) -> Any:
        return function

    if "torch._dynamo" not in sys.modules:
        compiler = ModuleType("torch._dynamo")
        compiler.disable = same  # type: ignore[attr-defined]
        compiler.graph_break = lambda *_: None  # type: ignore[attr-defined]
        # init_process_group() clears the compiler's cache; DDP queries its compile mode.
        compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # type: ignore[attr-defined]
        compiler.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")  # type: ignore[attr-defined]
        sys.modules["torch._dynamo"] = compiler
        torch._dynamo = compiler
