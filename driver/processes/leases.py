"""Decides who was not heard of for too long. Pure: the caller brings the time and what it has seen.

    leases.grant(key, now)             from here on it must be renewed
    leases.renew(key, now)             it was seen able to run; True: it had run out, and runs again
    leases.expired(now)                the look: who has run out since the last one, each once
    leases.drop(key)                   it is gone, or was fenced

A key is a worker, incarnation included, or a host. A renewal for one that was never granted, or was dropped, changes
nothing: who was fenced can't come back by being heard of again, only by a new grant.

Who looks may be paused itself (a suspended laptop, a stopped process, a blocked loop). Then it has missed renewals,
and nobody can be blamed for those: after a gap of more than PAUSE_S between two looks all leases begin anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

PAUSE_S = 1.0  # no look for longer: the observer was paused

Key = TypeVar("Key", bound=Hashable)


class Leases(Generic[Key]):
    """One lease per key, all of the same length. Times are seconds on the caller's clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._renewed: OrderedDict[Key, float] = OrderedDict()  # the longest not renewed first
        self._out: set[Key] = set()  # have run out, and were not renewed since
        self._looked_at = 0.0

    def __contains__(self, key: Key) -> bool:
        return key in self._renewed or key in self._out

    def __len__(self) -> int:
        return len(self._renewed) + len(self._out)

    def grant(self, key: Key, now: float) -> None:
        """It begins, or begins again."""
        self._out.discard(key)
        self._put(key, now)

    def renew(self, key: Key, now: float) -> bool:
        """Whether it had run out, and runs again. Nothing for a key that has no lease."""
        if key in self._out:
            self._out.remove(key)
            self._put(key, now)
            return True
        if key in self._renewed:
            self._put(key, now)
        return False

    def drop(self, key: Key) -> None:
        """No lease any more: its process is gone, or it was fenced."""
        self._renewed.pop(key, None)
        self._out.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Those that have run out since the last look, the longest not renewed first."""
        if now - self._looked_at > PAUSE_S:
            for key, renewed_at in self._renewed.items():
                self._renewed[key] = max(now, renewed_at)
        self._looked_at = now
        found: list[Key] = []
        for key, renewed_at in self._renewed.items():
            if now - renewed_at < self.lease_s:
                break
            found.append(key)
        for key in found:
            del self._renewed[key]
            self._out.add(key)
        return found

    def next_deadline(self) -> float | None:
        """When to look next, at the latest: early enough that the time between two looks is no pause."""
        if not self._renewed:
            return None
        first = next(iter(self._renewed.values()))
        return min(first + self.lease_s, self._looked_at + PAUSE_S / 2)

    def _put(self, key: Key, now: float) -> None:
        if not self._renewed:
            self._looked_at = now  # nobody had to look before
        self._renewed[key] = now
        self._renewed.move_to_end(key)
