"""First-fit allocator of whole pages in a range of bytes. Pure: does not access the memory.

First fit keeps allocations near the front, so that few pages are ever touched. Lists are fast enough, because only a
few dozen regions (buckets, staging) exist at a time.
"""

from __future__ import annotations

import bisect


class Allocator:
    """Allocator of regions in a range of ``size`` bytes. Not thread-safe."""

    def __init__(self, size: int, page: int) -> None:
        self._page = page
        self._end = size - size % page
        # Offsets of allocated regions, ascending. `_bytes` contains their sizes.
        self._starts: list[int] = []
        self._bytes: dict[int, int] = {}
        self.reach = 0  # end of the highest region that was ever allocated

    def allocate(self, size: int) -> int | None:
        """Allocate ``size`` bytes, rounded up to pages.

        Return the offset of the new region, or None if no gap is large enough.
        """
        if size <= 0:
            raise ValueError(f"a region of {size} bytes is invalid: pass a positive size")
        needed = -(-size // self._page) * self._page
        offset = 0
        for position, start in enumerate(self._starts):
            if start - offset >= needed:
                return self._lend(position, offset, needed)
            offset = start + self._bytes[start]
        if self._end - offset >= needed:
            return self._lend(len(self._starts), offset, needed)
        return None

    def _lend(self, position: int, offset: int, size: int) -> int:
        self._starts.insert(position, offset)
        self._bytes[offset] = size
        self.reach = max(self.reach, offset + size)
        return offset

    def free(self, offset: int) -> None:
        """Free a region that `allocate` returned. Adjacent free space is merged with it."""
        if offset not in self._bytes:
            raise ValueError(
                f"offset {offset} is not the start of an allocated region: free each region once"
            )
        del self._bytes[offset]
        self._starts.pop(bisect.bisect_left(self._starts, offset))

    def size_of(self, offset: int) -> int:
        """Return the size in bytes of the region that begins at this offset, in whole pages."""
        return self._bytes[offset]

    def around(self, offset: int) -> int | None:
        """Return the offset of the allocated region that contains this byte, or None if the byte is free."""
        position = bisect.bisect_right(self._starts, offset) - 1
        if position < 0:
            return None
        start = self._starts[position]
        return start if offset < start + self._bytes[start] else None

    @property
    def lent(self) -> int:
        """Return the number of bytes that are currently allocated."""
        return sum(self._bytes.values())
