"""Support for DDP's communication hooks with this package's process groups.

The fp16 hook in C++ (``_register_builtin_comm_hook(FP16_COMPRESS)``) requires results that only torch's own process
groups can produce, because the value of a Python future is a Python object. The equivalent Python hook is used instead.

A Python hook may call further collectives in callbacks of its futures, as PowerSGD's does. All ranks must call them in
the same order. With NCCL they do: its futures are complete when the call returns, so a callback runs where it is
attached. This package therefore also completes the futures of such a hook immediately, at the cost of the overlap with
the backward pass. Otherwise, the order of the callbacks could differ between ranks.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from elastic.torch_backend import works
from elastic.torch_backend.following_group import FollowingGroup

_torch: Any = distributed  # torch's stubs lack the names used here
_ddp: Any = DistributedDataParallel
_builtin: Any = DistributedDataParallel._register_builtin_comm_hook
_register: Any = DistributedDataParallel.register_comm_hook
# Hooks with a single collective and none in callbacks.
_SINGLE = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)


def replace() -> None:
    """Patch how DDP registers hooks for models that use this package's process groups. Idempotent."""
    _ddp._register_builtin_comm_hook = _register_builtin
    _ddp.register_comm_hook = _register_hook


def _register_builtin(model: DistributedDataParallel, kind: Any) -> None:
    ours = isinstance(model.process_group, FollowingGroup)
    if not ours or kind != _torch.BuiltinCommHookType.FP16_COMPRESS:
        _builtin(model, kind)
        return
    model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)


@functools.wraps(_register)
def _register_hook(model: DistributedDataParallel, state: Any, hook: Any) -> None:
    if isinstance(model.process_group, FollowingGroup) and callable(hook) and hook not in _SINGLE:
        hook = _in_order(hook)
    _register(model, state, hook)


def _in_order(hook: Any) -> Any:
    @functools.wraps(hook)
    def ordered(state: Any, bucket: Any) -> Any:
        with works.complete_at_once():
            return hook(state, bucket)

    return ordered
