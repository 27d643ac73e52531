"""Decides when a failed slot may be used again. Pure.

A slot waits twice as long each time its worker dies, and is given up after a limit, unless a world that it was part of
made progress: then its record is clean, and the next failure costs the shortest wait. A host is given up only by
policy, never because one of its workers died.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Slot = tuple[str, int]


@dataclass
class SlotRecord:
    fruitless: int = 0  # incarnations in a row whose worlds made no progress
    ready_at: float = 0.0
    given_up: bool = False


@dataclass
class Cooldown:
    """Times are seconds on the caller's clock."""

    min_s: float
    max_s: float
    attempts: int
    host_attempts: int | None = None
    _records: dict[Slot, SlotRecord] = field(default_factory=dict)

    def failed(self, slot: Slot, now: float, *, fruitful: bool) -> float | None:
        """Counts a failure; returns the seconds until the slot may be used again, or None: given up."""
        record = self._records.setdefault(slot, SlotRecord())
        record.fruitless = 1 if fruitful else record.fruitless + 1
        if record.fruitless >= self.attempts and not fruitful:
            record.given_up = True
            return None
        wait = min(self.max_s, self.min_s * 2.0 ** min(record.fruitless - 1, 60))
        record.ready_at = now + wait
        return wait

    def clear(self, slots: Iterable[Slot]) -> None:
        """A world that used these slots made progress: what counts against them is gone, what they wait for is not."""
        for slot in slots:
            record = self._records.get(slot)
            if record is not None:
                record.fruitless = 0

    def forget_host(self, host: str) -> None:
        """The host left the list: when it returns it is a new machine, with a clean record."""
        for slot in [s for s in self._records if s[0] == host]:
            del self._records[slot]

    def host_given_up(self, host: str) -> bool:
        if self.host_attempts is None:
            return False
        lost = sum(r.given_up for (h, _), r in self._records.items() if h == host)
        return lost >= self.host_attempts

    def given_up(self, slot: Slot) -> bool:
        record = self._records.get(slot)
        return (record is not None and record.given_up) or self.host_given_up(slot[0])

    def ready_at(self, slot: Slot) -> float | None:
        """From when the slot may be used; None if it is given up."""
        if self.given_up(slot):
            return None
        record = self._records.get(slot)
        return record.ready_at if record else 0.0
