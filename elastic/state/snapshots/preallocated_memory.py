"""Memory that a joining worker allocates and writes to before it joins, so that other ranks wait less.

The first write to new memory takes several times as long as a copy, because the kernel has to allocate each page and
fill it with zeros. A joining worker needs memory for the optimizer entries that it receives and for its copies of them,
while all other ranks wait for its first step. The estimated amount is therefore allocated in advance, and each part of
it is used once. The unused rest is returned to the system. Each tensor has a storage of exactly its size, like any
other tensor.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

from elastic.collectives.shared_memory import memfd

# Minimum size of a tensor in bytes. Smaller tensors use memory that the process already has.
LEAST_BYTES = 1 << 20
_ALIGNMENT = 64  # bytes; the alignment of torch's allocator


class PreallocatedMemory:
    """Zero-filled memory of ``size`` bytes with all pages allocated.

    Raises:
        OSError: the system does not have enough memory.
    """

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._end = 0
        zeros = torch.frombuffer(self._pages, dtype=torch.uint8)
        memfd.huge(zeros.data_ptr(), size)
        try:
            # This call releases the GIL, which the link thread needs.
            memfd.populate(zeros.data_ptr(), size)
        except OSError:  # Linux before 5.14 does not support this call
            zeros.zero_()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU tensor like ``tensor`` in this memory, or None if it is small or too little memory is left."""
        model = torch.empty_like(tensor, device="meta")
        end = self._end + model.nbytes
        if model.nbytes < LEAST_BYTES or end > len(self._pages):
            return None
        count = model.nbytes // model.dtype.itemsize
        flat = torch.frombuffer(self._pages, dtype=model.dtype, count=count, offset=self._end)
        self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return flat.as_strided(model.shape, model.stride())


_lock = threading.Lock()
_ahead: PreallocatedMemory | None = None


def make(size: int) -> None:
    """Preallocate ``size`` bytes for the tensors that `empty_like` creates until `leave`. No-op if memory is short."""
    global _ahead
    if size >= LEAST_BYTES:
        with contextlib.suppress(OSError):
            _ahead = PreallocatedMemory(size)


def leave() -> None:
    """Return unused memory to the system.

    This function is used memory is returned when the last tensor in it is freed.
    """
    global _ahead
    _ahead = None


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized CPU tensor like ``tensor``, in preallocated memory if that suffices.

    ``tensor`` may be on the ``meta`` device.
    """
    with _lock:
        made = None if _ahead is None else _ahead.empty_like(tensor)
    if made is None:
        made = torch.empty_like(tensor, device="cpu")
        if made.nbytes >= LEAST_BYTES:
            memfd.huge(made.data_ptr(), made.nbytes)
    return made
