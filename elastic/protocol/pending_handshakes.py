"""Limits on the number and age of a listener's unauthenticated connections. Pure: no I/O, no clock.

Peers may open any number of connections. At the limit, the oldest unauthenticated connection is closed and the new one
accepted, because a legitimate peer authenticates quickly.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

COUNT_LIMIT = 4096  # maximum number of unauthenticated connections of one listener
# maximum number of bytes that all unauthenticated peers together may send
BYTES_LIMIT = 128 * 1024 * 1024

Caller = TypeVar("Caller", bound=Hashable)


def count_limit(bytes_each: int, descriptors: int, extra: int = 0) -> int:
    """Return the maximum number of unauthenticated connections for a listener.

    It is at most a quarter of the process's limit of file descriptors, because authenticated peers need most of them.

    Args:
        bytes_each: number of bytes that each peer may send before it authenticates.
        descriptors: limit of file descriptors of the process; negative means unlimited.
        extra: number of peers that may connect at the same time.
    """
    most = min(COUNT_LIMIT, BYTES_LIMIT // bytes_each)
    return (most if descriptors < 0 else max(16, min(most, descriptors // 4))) + extra


class PendingHandshakes(Generic[Caller]):
    """Unauthenticated connections of one listener, in order of arrival."""

    def __init__(self, patience_s: float, limit: int) -> None:
        self._patience_s = patience_s
        self._limit = limit
        self._since: dict[Caller, float] = {}

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._since

    def add(self, caller: Caller, now: float) -> Caller | None:
        """Add a connection. Return the connection to close in its place, or None."""
        oldest = next(iter(self._since)) if len(self._since) >= self._limit else None
        if oldest is not None:
            del self._since[oldest]
        self._since[caller] = now
        return oldest

    def remove(self, caller: Caller) -> None:
        """Remove a connection that has authenticated or was closed."""
        self._since.pop(caller, None)

    def all(self) -> list[Caller]:
        return list(self._since)

    def late(self, now: float) -> list[Caller]:
        """Return the connections whose handshake has timed out."""
        return [each for each, since in self._since.items() if now - since > self._patience_s]
