"""Record of workers that are missing because their script failed or their state differs.

Pure: no I/O, no clock.

Workers that are missing because of a kill, a lost machine or a lost driver do not count.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic.driver.events import ExitCause
from elastic.driver.membership.scheduling.cooldown import Slot
from elastic.driver.reasons import Reason
from elastic.protocol.messages import Worker


@dataclass
class ScriptFailures:
    """Record of the script failures of one job.

    Args:
        began: number of members of the first world.
    """

    began: int = 0
    # for each slot, why the script failed in its last worker
    _of: dict[Slot, Reason] = field(default_factory=dict)
    # for each slot, the exit code of its last worker if that exit was unexplained
    _unexplained: dict[Slot, int] = field(default_factory=dict)
    # For each slot, the last rejected member and the digest of its layout.
    _turned_away: dict[Slot, tuple[Worker, str]] = field(default_factory=dict)
    # The last rejected member, and the generation in which it was a member.
    _last_turned_away: tuple[Worker, int] | None = None

    def failed(self, slot: Slot, reason: Reason) -> None:
        """Record that the script failed in a slot's worker.

        The script raised an exception, called sys.exit, or built a state that differs from that of the world.
        """
        self._of[slot] = reason

    def exited(self, slot: Slot, code: int, cause: ExitCause, reason: Reason) -> None:
        """Record an exit with a nonzero code for which the worker did not report a reason.

        An uncaught exception counts as a failure of the script. An unexplained exit code counts only if the slot's
        previous worker exited with the same code. Exits caused by the loss of a peer or of the driver never count.
        """
        unexplained = cause is ExitCause.UNKNOWN
        again = unexplained and self._unexplained.pop(slot, None) == code
        if unexplained:
            self._unexplained[slot] = code
        if again or cause is ExitCause.EXCEPTION:
            self.failed(slot, reason)
        else:
            self.lost(slot)

    def lost(self, slot: Slot) -> None:
        """Record that the worker of a slot was lost for a reason other than its script."""
        self._of.pop(slot, None)

    def world_began(self, members: Collection[Worker]) -> None:
        """Clear the failures of the slots that are used by the members of a new world."""
        self.began = self.began or len(members)
        if self._of:
            for worker in members:
                self.lost((worker.host, worker.slot))

    def lacking(self, returned: int) -> list[Reason]:
        """Return the script failures that explain why fewer workers returned than started.

        Returns an empty list if as many workers returned as started, or if no script failed.

        Args:
            returned: number of workers that returned.
        """
        return [*self._of.values()] if returned < self.began else []

    def repeats(self, worker: Worker, layout: str, *, member_of: int | None) -> Worker | None:
        """Return the previous member in the worker's slot if both were rejected for the same layout, otherwise None.

        Args:
            worker: the rejected worker.
            layout: digest of its layout.
            member_of: generation in which the worker was a member, or None.
        """
        slot = (worker.host, worker.slot)
        if member_of is not None:
            self._turned_away[slot] = (worker, layout)
            self._last_turned_away = (worker, member_of)
            return None
        before = self._turned_away.get(slot)
        return before[0] if before is not None and before[1] == layout else None

    def turned_away_before(self, generation: int) -> Worker | None:
        """Return the member that was rejected when this generation was formed."""
        last = self._last_turned_away
        return last[0] if last is not None and last[1] == generation - 1 else None
