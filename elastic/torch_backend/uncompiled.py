"""Keeps ``torch.compile`` out of process groups: to torch, a collective is no code that could be compiled.

Those of torch are C++, which its compiler never sees. It would compile a method in Python that a compiled model calls,
as DistributedDataParallel does for its buffers, and fail at the first attribute. Nothing of the compiler is imported.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame

_eval_frame: Any = eval_frame
_set_strategy = getattr(_eval_frame, "set_code_exec_strategy", None)  # private: a torch may lack it


def keep_out(*classes: type) -> None:
    """Of their methods, and of whatever these call."""
    for each in classes:
        for method in vars(each).values():
            if isinstance(method, FunctionType):
                method._torchdynamo_disable = True  # type: ignore[attr-defined]
                if _set_strategy is not None:
                    skip = _eval_frame._FrameAction.SKIP
                    _set_strategy(method.__code__, _eval_frame._FrameExecStrategy(skip, skip))
