"""Liveness timeouts of workers and hosts. Pure: the caller passes times and observations.

    leases.grant(key, now)             start: the key must be renewed from now on
    leases.renew(key, now)             the worker or host is able to run; True: it had expired
    leases.expired(now)                check: keys that expired since the last check
    leases.drop(key)                   the worker exited or was fenced

A key is a worker, including its incarnation, or a host. A renewal without a grant or after a drop has no effect. Only a
new grant restarts the timeout of a fenced worker.

The observer itself may be paused (a suspended laptop, a stopped process, a blocked event loop) and miss renewals. If
more than PAUSE_S passes between two checks, all timeouts therefore restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

# If the interval between two checks exceeds this many seconds, the observer was paused.
PAUSE_S = 1.0

Key = TypeVar("Key", bound=Hashable)


class LivenessTimeouts(Generic[Key]):
    """Set of liveness timeouts of the same length, one for each key. Times are in seconds on the caller's clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._renewed: OrderedDict[Key, float] = OrderedDict()  # least recently renewed first
        self._out: set[Key] = set()  # expired keys that have not been renewed since
        self._looked_at = 0.0

    def __contains__(self, key: Key) -> bool:
        return key in self._renewed or key in self._out

    def __len__(self) -> int:
        return len(self._renewed) + len(self._out)

    def grant(self, key: Key, now: float) -> None:
        """Start or restart the timeout of a key."""
        self._out.discard(key)
        self._put(key, now)

    def renew(self, key: Key, now: float) -> bool:
        """Renew the timeout of a key. Return whether the timeout had expired. No effect on a key without a grant."""
        if key in self._out:
            self._out.remove(key)
            self._put(key, now)
            return True
        if key in self._renewed:
            self._put(key, now)
        return False

    def drop(self, key: Key) -> None:
        """Remove a key whose process exited or was fenced."""
        self._renewed.pop(key, None)
        self._out.discard(key)

    def expired(self, now: float) -> list[Key]:
        """Return the keys that have expired since the last check, least recently renewed first."""
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
        """Return the latest time for the next call of `expired`.

        A later call would be treated as a pause of the observer.
        """
        if not self._renewed:
            return None
        first = next(iter(self._renewed.values()))
        return min(first + self.lease_s, self._looked_at + PAUSE_S / 2)

    def _put(self, key: Key, now: float) -> None:
        if not self._renewed:
            self._looked_at = now  # No check was due before, because there was no key.
        self._renewed[key] = now
        self._renewed.move_to_end(key)
