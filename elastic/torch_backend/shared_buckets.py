"""Puts DDP's buckets into the memory that the ranks of a host share: each is reduced where it lies. Acts.

DDP's reducer, in C++, allocates a bucket with one call of ``empty``: when it is made, and when it has learnt in which
order gradients become ready. Both are calls from Python. Around them, that ``empty`` is answered here. A torch that
allocates in another way has its buckets where it puts them, and they are carried there and back.
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
from elastic.torch_backend.following_group import FollowingGroup
from elastic.torch_backend.uncompiled import keep_out

_torch: Any = distributed  # its stubs lack what is used here
_TorchReducer: Any = _torch.Reducer
_Mode: Any = TorchDispatchMode  # has no types
_LEAST_BYTES = 4096  # a smaller one is carried as fast as it is reduced in place


class SharingReducer(_TorchReducer):  # type: ignore[misc]
    """torch's, in its place. Over a process group that is not ours it is as torch's."""

    def __init__(
        self, parameters: Any, buckets: Any, limits: Any, group: Any, *rest: Any, **options: Any
    ) -> None:
        self._allocates = isinstance(group, FollowingGroup)
        with self._allocating():
            super().__init__(parameters, buckets, limits, group, *rest, **options)

    def _rebuild_buckets(self) -> bool:
        with self._allocating():
            rebuilt: bool = super()._rebuild_buckets()
        self._allocates = self._allocates and not rebuilt  # it is done once
        return rebuilt

    def _allocating(self) -> AbstractContextManager[object]:
        return _InArena() if self._allocates else nullcontext()


def replace() -> None:
    """From now on, for each DistributedDataParallel that is made. Idempotent."""
    _torch.Reducer = SharingReducer


class _InArena(_Mode):  # type: ignore[misc]
    """While it is entered, flat tensors of floats on the CPU are allocated in the arena."""

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
    """None: this is no bucket, or there is no room."""
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
