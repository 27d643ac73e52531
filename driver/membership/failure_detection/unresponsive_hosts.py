"""Detection of unresponsive hosts that other workers wait for. Pure. `stuck` detects the waits.

    others wait --half of silence_s--> asked --no answer for the other half, in two checks--> silent: given up
                                         |
                                         +--all have answered: asked again after silence_s, as long as others wait

A host's kernel acknowledges packets even if the host's processes do not run, so acknowledgements cannot distinguish a
stopped agent (on a paused or swapping machine) from a busy one. While no worker waits for the host, this does not
matter. But if all other workers wait for workers on hosts that do not respond, the wait could last forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Delay of the last check after the deadline, in seconds, because an answer may have arrived but not been read yet.
READ_S = 0.05
# If a check is late by more than this many seconds, the driver itself was paused and may have missed answers.
LATE_S = 0.5


@dataclass
class UnresponsiveHosts:
    """Tracker of hosts that do not respond during one wait. Times are in seconds on the caller's clock."""

    silence_s: float
    look_at: float | None = None  # time of the next check, or None if no worker waits
    _unanswered: set[str] = field(default_factory=set)
    _asked_at: float | None = None
    # whether the deadline for answers has passed, and only the last check remains
    _last_look: bool = False

    def begin(self, since: float, now: float) -> None:
        """Start tracking a wait that began at ``since``."""
        self.look_at = max(since + self.silence_s / 2, now)

    def end(self) -> None:
        """Stop tracking, because no worker waits any longer."""
        if self.look_at is not None:
            self.look_at = self._asked_at = None
            self._last_look = False
            self._unanswered.clear()

    def answered(self, host: str) -> bool:
        """Record an answer from the host. Return whether an answer was pending."""
        if host not in self._unanswered:
            return False
        self._unanswered.remove(host)
        return True

    def for_s(self, now: float) -> float:
        """Return the seconds since the hosts were queried, or 0 if no query is pending."""
        return now - (now if self._asked_at is None else self._asked_at)

    def silent(self, now: float) -> frozenset[str]:
        """Return the hosts that have missed the deadline for their answers."""
        assert self.look_at is not None
        if self._asked_at is None or now > self.look_at + LATE_S:
            self._asked_at, self.look_at = None, now
            return frozenset()
        if self._unanswered and not self._last_look:
            self._last_look, self.look_at = True, now + READ_S
            return frozenset()
        found = frozenset(self._unanswered)
        self.look_at = max(self._asked_at + self.silence_s, now + READ_S)
        self._asked_at = None
        self._last_look = False
        self._unanswered.clear()
        return found

    def ask(self, hosts: Iterable[str], now: float) -> bool:
        """Return whether these hosts must be queried now. If so, record the query."""
        if self._asked_at is not None or self.look_at is None or now < self.look_at:
            return False
        self._unanswered = set(hosts)
        self._asked_at, self._last_look = now, False
        self.look_at = now + max(READ_S, self.silence_s / 2 - READ_S)
        return True
