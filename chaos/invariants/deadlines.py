"""Waits that must have ended by a time, and those that have not. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class Waits:
    """Each wait has a key and a sentence that says what is awaited. A later ``begin`` of the same key replaces it."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[float, str]] = {}
        self._by: list[tuple[float, int, Hashable]] = []  # a heap; may name waits that have ended
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
        """What should have happened before ``now`` and has not; empty if there is nothing."""
        while self._by and self._by[0][0] < now:
            by, _, key = heapq.heappop(self._by)
            found = self._open.get(key)
            if found is not None and found[0] == by:
                return f"{found[1]} by {by:.3f}"
        return ""
