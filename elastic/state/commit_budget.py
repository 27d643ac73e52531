"""Chooses the calls of ``commit()`` at which a copy is made, so that copies take a given part of the time. Pure.

All ranks make the same choice: it depends only on the number of calls and on costs that the ranks have exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LONGEST_S = 60.0  # seconds of training that a failure may repeat at most
_FIRST = 2  # copies whose cost is ignored: they allocate memory
_MARGIN = 1.25  # an interval that is off by less than this factor is kept


class CommitBudget:
    """Interval between the copies of one state in one world.

    Args:
        share: largest part of the time that copies may take, above 0.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.every = 1  # number of calls for which one copy is made
        self._calls = 0  # calls since the last copy
        self._copies = 0

    def due(self) -> bool:
        """Count one call. Return whether a copy is made."""
        self._calls += 1
        return self._copies == 0 or self._calls >= self.every

    @property
    def skipped(self) -> bool:
        """Whether there were calls since the last copy."""
        return self._calls > 0

    def copied(self, copies_s: Sequence[float], steps_s: Sequence[float]) -> bool:
        """Take account of a copy.

        Args:
            copies_s: seconds that the copy has stopped each rank.
            steps_s: seconds of training of each rank for one call; 0: unknown.

        Returns:
            Whether the interval has changed.
        """
        self._calls = 0
        self._copies += 1
        before = self.every
        if self._copies > _FIRST and min(steps_s) > 0:
            chosen = interval(self.share, max(copies_s), min(steps_s))
            if not before / _MARGIN <= chosen <= before * _MARGIN:
                self.every = chosen
        return self.every != before


def interval(share: float, copy_s: float, step_s: float) -> int:
    """Return for how many steps one copy is made: the fewest within the budget, and at most `LONGEST_S` seconds."""
    within = math.ceil(copy_s / (share * step_s))
    return max(1, min(within, int(LONGEST_S / step_s)))
