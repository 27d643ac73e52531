"""Memory that a newcomer writes to before it joins, so that the others need not wait for the kernel meanwhile. Acts.

New memory costs several times a copy when it is first written to: the kernel has to find each page and fill it with
zeros. A newcomer needs some for the entries of optimizers that it is sent and for its copies of them, while all others
wait for its first step. So it is made before, as much as will probably be needed, and dealt out once. What was not
needed then goes back. Each tensor has a storage of exactly its size, as if it had been allocated.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

from elastic.collectives.shared_memory import memfd

LEAST_BYTES = 1 << 20  # of a tensor; the memory of smaller ones is in the process already
_ALIGNMENT = 64  # bytes; what torch's allocator gives


class PreallocatedMemory:
    """``size`` bytes of zeros, each page of which is there. Raises OSError where the system has not as much."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._end = 0
        zeros = torch.frombuffer(self._pages, dtype=torch.uint8)
        memfd.huge(zeros.data_ptr(), size)
        try:
            # Without Python's lock, to which the link thread must come.
            memfd.populate(zeros.data_ptr(), size)
        except OSError:  # a kernel before 5.14
            zeros.zero_()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor of this shape, dtype and order of strides, on the CPU. None: there is no room for it."""
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
    """For the tensors that `empty_like` makes until `leave`. Where memory is short, there is none."""
    global _ahead
    if size >= LEAST_BYTES:
        with contextlib.suppress(OSError):
            _ahead = PreallocatedMemory(size)


def leave() -> None:
    """Return unused memory to the system. Used memory follows with the last tensor in it."""
    global _ahead
    _ahead = None


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """As torch's on the CPU, of memory made ahead if there is enough. ``tensor`` may be on ``meta``."""
    with _lock:
        made = None if _ahead is None else _ahead.empty_like(tensor)
    if made is None:
        made = torch.empty_like(tensor, device="cpu")
        if made.nbytes >= LEAST_BYTES:
            memfd.huge(made.data_ptr(), made.nbytes)
    return made
