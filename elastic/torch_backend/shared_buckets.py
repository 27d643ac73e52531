"""Allocation of DDP's buckets in memory that the ranks of a host share, so that buckets are reduced in place.

DDP's reducer, in C++, allocates each bucket with ``empty``: when the reducer is created, and again when it has learned
the order in which gradients become ready. Both happen in calls from Python, so the calls of ``empty`` can be
intercepted. If another version of torch allocates differently, buckets are copied to shared memory and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.collectives.shared_memory import arena
from elastic.torch_backend.compile_exclusion import keep_out
from elastic.torch_backend.following_group import FollowingGroup

_torch: Any = distributed  # torch's stubs lack the names used here
_TorchReducer: Any = _torch.Reducer
_Mode: Any = TorchDispatchMode  # untyped, because torch's stubs lack its types
# Below this size in bytes, copying a bucket is as fast as reducing it in place.
_LEAST_BYTES = 4096


class SharingReducer(_TorchReducer):  # type: ignore[misc]
    """Replacement of torch's reducer. It behaves like the original for process groups of other packages."""

    def __init__(
        self, parameters: Any, buckets: Any, limits: Any, group: Any, *rest: Any, **options: Any
    ) -> None:
        self._allocates = isinstance(group, FollowingGroup)
        with self._allocating():
            super().__init__(parameters, buckets, limits, group, *rest, **options)

    def _rebuild_buckets(self) -> bool:
        with self._allocating():
            rebuilt: bool = super()._rebuild_buckets()
        self._allocates = self._allocates and not rebuilt  # buckets are rebuilt once
        return rebuilt

    def _allocating(self) -> AbstractContextManager[object]:
        return _InArena() if self._allocates else nullcontext()


def replace() -> None:
    """Patch torch for every DistributedDataParallel that is created later. Idempotent."""
    _torch.Reducer = SharingReducer


class _InArena(_Mode):  # type: ignore[misc]
    """Dispatch mode in which flat float tensors on the CPU are allocated in the arena."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            made = _bucket(*args, **options)
            if made is not None:
                return made
        return func(*args, **options)


def _bucket(
    shape: list[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor | None:
    flat = len(shape) == 1 and layout in (None, torch.strided)
    on_cpu = device is not None and device.type == "cpu"
    if not (flat and on_cpu and dtype is not None and dtype.is_floating_point):
        return None
    count = math.prod(shape)
    if count * dtype.itemsize < _LEAST_BYTES:
        return None
    mine = arena.mine()
    return None if mine is None else mine.tensor(count, dtype)


keep_out(SharingReducer)
