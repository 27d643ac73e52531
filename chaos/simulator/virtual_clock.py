"""Virtual clock, which advances from event to event.

It also contains the seeded random generator of the run, the only source of random numbers.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Happening = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Clock:
    """Virtual clock, in seconds. Events at the same time happen in the order in which they were scheduled."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.happened = 0
        self._order = 0
        self._coming: list[Happening] = []

    def at(self, time: float, happen: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._coming, (time, self._order, happen, args))

    def after(self, delay_s: float, happen: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, happen, *args)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def chance(self, share: float) -> bool:
        """Return True with the given probability."""
        return share > 0 and self.random.random() < share

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> None:
        """Process all events that are due before ``until``, or until ``over()`` returns True."""
        coming, pop = self._coming, heapq.heappop
        while coming and coming[0][0] <= until and not over():
            self.now, _, happen, args = pop(coming)
            self.happened += 1
            happen(*args)
        if not over():
            self.now = max(self.now, until) if coming else self.now
