"""Flat tensors in the arena whose pages stay when they die, for those that come later. Acts.

For results that another framework is handed without a copy: it holds them until it has used them, and nobody else knows
when that is. New memory for each would cost more than the reduction: the system fills its pages with zeros first, one
by one.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import weakref

import torch

from elastic.collectives.shared_memory import arena, memfd
from elastic.collectives.shared_memory.arena import Region

KEPT = 4  # regions that nobody uses: some frameworks let go of a step's results in the middle of the next step


class ReusedMemory:
    """Thread-safe. A process needs one, which keeps the regions that were used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Region] = []  # longest unused first
        # A tensor may die at any instruction of any thread, also of the one that holds the lock.
        self._dead: collections.deque[Region] = collections.deque()

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """With whatever was there before, from the start of a page on. As torch makes it, where the arena has no room.

        Its memory is lent until the last view of it has died.
        """
        region = self._region(elements * dtype.itemsize)
        if region is None:
            return torch.empty(elements, dtype=dtype, device="cpu")
        # The storage holds this object, and nothing else does.
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
