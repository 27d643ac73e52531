"""Callers who have not proved yet that they know the job's secret: how many a listener keeps, and for how long. Pure.

Any number may call. The oldest gives way to the newest: who belongs here needs a moment to say so, and has had the
longest.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

COUNT_LIMIT = 4096  # for one listener
BYTES_LIMIT = 128 * 1024 * 1024  # of what they may say, all together

Caller = TypeVar("Caller", bound=Hashable)


def count_limit(bytes_each: int, descriptors: int, extra: int = 0) -> int:
    """How many are kept, of whom each may say ``bytes_each`` bytes: at most a quarter of the ``descriptors`` that this
    process may have (negative: any number), because most are for those who have proved it. ``extra``: how many of
    those may come in one moment.
    """
    most = min(COUNT_LIMIT, BYTES_LIMIT // bytes_each)
    return (most if descriptors < 0 else max(16, min(most, descriptors // 4))) + extra


class Strangers(Generic[Caller]):
    """Those of one listener, in the order in which they came."""

    def __init__(self, patience_s: float, limit: int) -> None:
        self._patience_s = patience_s
        self._limit = limit
        self._since: dict[Caller, float] = {}

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._since

    def add(self, caller: Caller, now: float) -> Caller | None:
        """Returns who has to give way, and is none of them any more."""
        oldest = next(iter(self._since)) if len(self._since) >= self._limit else None
        if oldest is not None:
            del self._since[oldest]
        self._since[caller] = now
        return oldest

    def remove(self, caller: Caller) -> None:
        """It has proved it, or is gone."""
        self._since.pop(caller, None)

    def all(self) -> list[Caller]:
        return list(self._since)

    def late(self, now: float) -> list[Caller]:
        """Those whose time is over."""
        return [each for each, since in self._since.items() if now - since > self._patience_s]
