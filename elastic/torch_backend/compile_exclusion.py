"""Exclusion of process groups and hooks from ``torch.compile``.

torch's own process groups are implemented in C++, which the compiler does not trace. If a compiled model calls a Python
method of a process group, as DistributedDataParallel does for its buffers, the compiler tries to compile the method and
fails at the first attribute. Hooks of optimizers run in each compiled step, and the compiler of torch 2.15 replaces the
weak references that a hook creates with the objects themselves. This module does not import the compiler.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame

_eval_frame: Any = eval_frame
# private API of torch, missing in some versions
_set_strategy = getattr(_eval_frame, "set_code_exec_strategy", None)


def keep_out(*classes: type) -> None:
    """Exclude all methods of the classes, and the functions that they call, from compilation."""
    for each in classes:
        for method in vars(each).values():
            if isinstance(method, FunctionType):
                keep_function_out(method)


def keep_function_out(function: Any) -> None:
    """Exclude a function, and the functions that it calls, from compilation. Compiled steps run it as Python code."""
    function._torchdynamo_disable = True
    if _set_strategy is not None:
        skip = _eval_frame._FrameAction.SKIP
        _set_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
