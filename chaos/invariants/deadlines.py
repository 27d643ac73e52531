"""Deadlines by which expected events must occur. Pure: no I/O, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class Deadlines:
    """Set of pending waits, each with a key, a deadline and a sentence about the expected event.

    `begin` replaces an existing wait with the same key.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[float, str]] = {}
        # heap of deadlines, including those of waits that have already ended
        self._by: list[tuple[float, int, Hashable]] = []
        self._count = 0

    def begin(self, key: Hashable, by: float, what: str) -> None:
        self._open[key] = (by, what)
        self._count += 1
        heapq.heappush(self._by, (by, self._count, key))

    def begin_unless_open(self, key: Hashable, by: float, what: str) -> None:
        if key not in self._open:
            self.begin(key, by, what)

    def end(self, *keys: Hashable) -> None:
        for key in keys:
            self._open.pop(key, None)

    def end_all(self) -> None:
        self._open.clear()
        self._by.clear()

    def overdue(self, now: float) -> str:
        """Return a sentence about the expected events that are overdue at ``now``, or an empty string."""
        while self._by and self._by[0][0] < now:
            by, _, key = heapq.heappop(self._by)
            found = self._open.get(key)
            if found is not None and found[0] == by:
                return f"{found[1]} by {by:.3f}"
        return ""
