"""Cooldown of failed slots. Pure: no I/O, no clock.

The cooldown of a slot doubles after each failure of its worker. After a number of consecutive failures, the slot is no
longer used. When a world that contains the slot makes progress, the slot's failures are cleared, so its next cooldown
has the initial length. A whole host is given up only when ``host_attempts`` of its slots have been given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Slot = tuple[str, int]


@dataclass
class SlotRecord:
    fruitless: int = 0  # number of consecutive workers in the slot whose worlds made no progress
    ready_at: float = 0.0
    given_up: bool = False


@dataclass
class Cooldown:
    """Cooldowns of all slots. Times are in seconds on the caller's clock."""

    min_s: float
    max_s: float
    attempts: int
    host_attempts: int | None = None
    _records: dict[Slot, SlotRecord] = field(default_factory=dict)

    def unhealthy(self, slot: Slot, now: float) -> float:
        """Record a failed health check. Return the seconds until the next check.

        Failed checks never give up a slot.
        """
        record = self._records.setdefault(slot, SlotRecord())
        record.fruitless += 1
        return self._cools(record, now)

    def failed(self, slot: Slot, now: float, *, fruitful: bool) -> float | None:
        """Record a failure of a slot's worker.

        Return the seconds until the slot may be used again, or None if the slot is given up.

        Args:
            slot: the slot.
            now: current time, in seconds.
            fruitful: whether the worker's world made progress before the failure.
        """
        record = self._records.setdefault(slot, SlotRecord())
        record.fruitless = 1 if fruitful else record.fruitless + 1
        if record.fruitless >= self.attempts and not fruitful:
            record.given_up = True
            return None
        return self._cools(record, now)

    def _cools(self, record: SlotRecord, now: float) -> float:
        wait = min(self.max_s, self.min_s * 2.0 ** min(record.fruitless - 1, 60))
        record.ready_at = now + wait
        return wait

    def clear(self, slots: Iterable[Slot]) -> None:
        """Clear the failures of slots whose world made progress. A cooldown that has begun continues."""
        # Only few slots of a large job have failed.
        failed = {slot: record for slot, record in self._records.items() if record.fruitless}
        if failed:
            for slot in failed.keys() & slots:
                failed[slot].fruitless = 0

    def forget_host(self, host: str) -> None:
        """Discard the records of a host that was removed from the list.

        If the host is listed again, it counts as a new machine.
        """
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
        """Return the time from which the slot may be used, in seconds, or None if the slot is given up."""
        if self.given_up(slot):
            return None
        record = self._records.get(slot)
        return record.ready_at if record else 0.0
