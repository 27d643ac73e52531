"""Imports torch in two thirds of the time. ``import light`` before anything that imports torch, in scripts that start
very often.

Objects of torch are excluded from garbage collection, now and at exit; torch has one thread, and no compiler: the first
optimizer would import it, which takes as long as the rest of torch. Does nothing with ``SHARDED`` in the environment:
DTensor needs the modules that a light torch lacks.
"""

import gc
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


def without_compiler() -> None:
    """Replace the compiler's module by one with the parts that torch uses: two no-op decorators and a few functions."""
    import torch

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


if "SHARDED" not in os.environ:
    gc.disable()
    import torch

    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    without_compiler()
