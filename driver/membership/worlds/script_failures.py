"""Decides which workers are missing because their scripts have failed, and which states differ for good. Pure.

A worker that is killed, or whose machine is lost, is no failure of its script.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic.driver.membership.scheduling.cooldown import Slot
from elastic.driver.reasons import Reason
from elastic.protocol.messages import Worker


@dataclass
class ScriptFailures:
    """``began``: how many members the first world had."""

    began: int = 0
    _of: dict[Slot, Reason] = field(
        default_factory=dict
    )  # why the script of its last worker failed
    # Members that were turned away, and the digests of their layouts.
    _turned_away: dict[Slot, tuple[Worker, str]] = field(default_factory=dict)

    def failed(self, slot: Slot, reason: Reason) -> None:
        """The script of its worker has raised, or ended with an exit code, or has another state than the world."""
        self._of[slot] = reason

    def lost(self, slot: Slot) -> None:
        """Its worker is gone for another reason."""
        self._of.pop(slot, None)

    def world_began(self, members: Collection[Worker]) -> None:
        """Reset the failure counts of the slots of a new world's members."""
        self.began = self.began or len(members)
        for worker in members:
            self.lost((worker.host, worker.slot))

    def lacking(self, returned: int) -> list[Reason]:
        """Why fewer workers have returned than the job began with; empty if no script is to blame."""
        return [*self._of.values()] if returned < self.began else []

    def repeats(self, worker: Worker, layout: str, *, member: bool) -> Worker | None:
        """A worker is turned away for its layout: the member before it in its slot, if that was, for the same one."""
        slot = (worker.host, worker.slot)
        if member:
            self._turned_away[slot] = (worker, layout)
            return None
        before = self._turned_away.get(slot)
        return before[0] if before is not None and before[1] == layout else None
