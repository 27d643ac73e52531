"""Decides whether hosts that the others wait for are there at all. Pure; `stuck` says who waits for whom.

    others wait --half of silence_s--> asked --no answer for the other half, in two looks--> silent: given up
                                         |
                                         +--all have answered: asked again after silence_s, as long as others wait

The kernel of a host acknowledges what is sent there whether its processes run or not. A host whose agent is stopped
too (a paused machine, one that swaps) can't be told from a busy one by that, and nothing is lost as long as nobody
waits for it. Once all others wait for nobody but workers on hosts that don't answer, they would wait in vain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Answers may be here already, and only not be read yet: the last look comes so much later than they were due.
READ_S = 0.05
LATE_S = 0.5  # who looks so late was paused itself, and has missed answers


@dataclass
class Silence:
    """The silence of hosts during one wait. Times are seconds on the caller's clock."""

    silence_s: float
    look_at: float | None = None  # None: nobody waits
    _unanswered: set[str] = field(default_factory=set)
    _asked_at: float | None = None
    _last_look: bool = False  # answers were due at the one before

    def begin(self, since: float, now: float) -> None:
        """Start: others have been waiting since ``since``."""
        self.look_at = max(since + self.silence_s / 2, now)

    def end(self) -> None:
        """End: no worker waits any more."""
        if self.look_at is not None:
            self.look_at = self._asked_at = None
            self._last_look = False
            self._unanswered.clear()

    def answered(self, host: str) -> bool:
        """Record an answer of the host. Returns whether one was requested."""
        if host not in self._unanswered:
            return False
        self._unanswered.remove(host)
        return True

    def for_s(self, now: float) -> float:
        """How long ago they were asked."""
        return now - (now if self._asked_at is None else self._asked_at)

    def silent(self, now: float) -> frozenset[str]:
        """The look: hosts that have not answered in time."""
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
        """Whether it is time to ask these."""
        if self._asked_at is not None or self.look_at is None or now < self.look_at:
            return False
        self._unanswered = set(hosts)
        self._asked_at, self._last_look = now, False
        self.look_at = now + max(READ_S, self.silence_s / 2 - READ_S)
        return True
