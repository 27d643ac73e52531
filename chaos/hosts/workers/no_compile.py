"""Keeps torch's compiler out of scripts that compile nothing: the first optimizer would import it, which takes as long
as the rest of torch. For what is started very often; call it before anything makes an optimizer.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def without_compiler() -> None:
    """Puts a module with torch.compile's two decorators, which do nothing, where the compiler would be; and with what
    ``torch.distributed`` asks it for.
    """

    def same(function: Any, *_: Any, **__: Any) -> Any:
        return function

    if "torch._dynamo" not in sys.modules:
        compiler = ModuleType("torch._dynamo")
        compiler.disable = same  # type: ignore[attr-defined]
        compiler.graph_break = lambda *_: None  # type: ignore[attr-defined]
        # init_process_group() has the compiler forget what it knew; DDP asks how it is to be compiled.
        compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # type: ignore[attr-defined]
        compiler.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")  # type: ignore[attr-defined]
        sys.modules["torch._dynamo"] = compiler
        torch._dynamo = compiler
