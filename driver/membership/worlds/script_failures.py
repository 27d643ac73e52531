"""Records of workers that are missing because their scripts failed, and of states that differ permanently. Pure.

A kill or the loss of a machine does not count as a failure of the script.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic.driver.membership.scheduling.cooldown import Slot
from elastic.driver.reasons import Reason
from elastic.protocol.messages import Worker


@dataclass
class ScriptFailures:
    """Script failures of one job. ``began``: number of members of the first world."""

    began: int = 0
    _of: dict[Slot, Reason] = field(
        default_factory=dict
    )  # why the script of its last worker failed
    # Rejected members and the digests of their layouts.
    _turned_away: dict[Slot, tuple[Worker, str]] = field(default_factory=dict)

    def failed(self, slot: Slot, reason: Reason) -> None:
        """Record a failed script: it raised, exited with a nonzero code, or has another state than the world."""
        self._of[slot] = reason

    def lost(self, slot: Slot) -> None:
        """Record that a slot's worker was lost for another reason."""
        self._of.pop(slot, None)

    def world_began(self, members: Collection[Worker]) -> None:
        """Reset the failure records of the slots of a new world's members."""
        self.began = self.began or len(members)
        for worker in members:
            self.lost((worker.host, worker.slot))

    def lacking(self, returned: int) -> list[Reason]:
        """Return why fewer workers returned than the job began with; empty if no script is to blame."""
        return [*self._of.values()] if returned < self.began else []

    def repeats(self, worker: Worker, layout: str, *, member: bool) -> Worker | None:
        """Record a worker rejected for its layout.

        Return the member rejected before it in its slot for the same layout, if any.
        """
        slot = (worker.host, worker.slot)
        if member:
            self._turned_away[slot] = (worker, layout)
            return None
        before = self._turned_away.get(slot)
        return before[0] if before is not None and before[1] == layout else None
