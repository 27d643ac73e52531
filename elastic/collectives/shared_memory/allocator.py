"""Which bytes of a range are lent: first fit, in whole pages. Pure: it touches no memory.

First fit keeps what is lent near the front, so that the pages ever touched stay few. A few dozen regions are lent at a
time (buckets, staging), so that lists are fast enough.
"""

from __future__ import annotations

import bisect


class Regions:
    """Of a range of ``size`` bytes. Not thread-safe."""

    def __init__(self, size: int, page: int) -> None:
        self._page = page
        self._end = size - size % page
        self._starts: list[int] = []  # of what is lent, ascending, with the bytes of each
        self._bytes: dict[int, int] = {}
        self.reach = 0  # one past the last byte that was ever lent

    def allocate(self, size: int) -> int | None:
        """The offset of a region of so many bytes, rounded up to pages; None where no gap is wide enough."""
        if size <= 0:
            raise ValueError(f"a region of {size} bytes")
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
        """Of a region that `allocate` returned. What is free on both sides of it becomes one gap with it."""
        if offset not in self._bytes:
            raise ValueError(f"no region begins at {offset}")
        del self._bytes[offset]
        self._starts.pop(bisect.bisect_left(self._starts, offset))

    def size_of(self, offset: int) -> int:
        """Bytes of the region that begins here, in whole pages."""
        return self._bytes[offset]

    def around(self, offset: int) -> int | None:
        """Where the region begins in which this byte lies; None: it is free."""
        position = bisect.bisect_right(self._starts, offset) - 1
        if position < 0:
            return None
        start = self._starts[position]
        return start if offset < start + self._bytes[start] else None

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return sum(self._bytes.values())
