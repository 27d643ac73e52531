"""Pool of flat tensors in the arena: the pages of freed tensors are reused.

This module is used for results that are passed without a copy to another framework, which keeps them for an unknown
time. Allocating new memory for each result would cost more than the reduction, since the kernel zeroes every new page.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import weakref

import torch

from elastic.collectives.shared_memory import arena, memfd
from elastic.collectives.shared_memory.arena import Region

# Number of unused regions to keep. Some frameworks release a step's results in the middle of the next step.
KEPT = 4


class ReusedMemory:
    """Pool of memory regions for reuse.

    Thread-safe. The pool keeps the most recently used regions. One pool per process is enough.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Region] = []  # unused regions, least recently used first
        # Regions of freed tensors, added without a lock: the garbage collector may free a tensor at any point in any
        # thread, even in the one that holds the lock.
        self._dead: collections.deque[Region] = collections.deque()

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor, aligned to pages. If the arena has no room, torch allocates it.

        The memory of the tensor is in use until its last view is freed.
        """
        region = self._region(elements * dtype.itemsize)
        if region is None:
            return torch.empty(elements, dtype=dtype, device="cpu")
        # Only the tensor's storage references this object, so both are freed together.
        held = (ctypes.c_char * region.bytes).from_address(region.address)
        weakref.finalize(held, self._dead.append, region).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=elements)

    def _region(self, size: int) -> Region | None:
        own = arena.mine() if size > 0 else None
        if own is None:
            return None
        needed = -(-size // memfd.PAGE) * memfd.PAGE
        with self._lock:
            while self._dead:
                self._free.append(self._dead.popleft())
            while len(self._free) > KEPT:
                self._free.pop(0).release()
            for number, region in enumerate(self._free):
                if region.bytes == needed:
                    return self._free.pop(number)
        return own.take(size)
