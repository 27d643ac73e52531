"""Choice of the calls of ``commit()`` that make a copy, so that copies take at most a given share of the time. Pure.

All ranks make the same choice, because the choice depends only on the number of calls and on costs that the ranks have
exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LONGEST_S = 60.0  # seconds of training that a failure may repeat at most
_FIRST = 2  # number of initial copies whose cost is ignored, because they allocate memory
_MARGIN = 1.25  # an interval that is off by less than this factor is kept


class CommitBudget:
    """Interval between the copies of one state in one world.

    Args:
        share: largest share of the time that copies may take, above 0.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.every = 1  # number of calls for which one copy is made
        self._calls = 0  # number of calls since the last copy
        self._copies = 0

    def due(self) -> bool:
        """Count one call. Return whether a copy is made."""
        self._calls += 1
        return self._copies == 0 or self._calls >= self.every

    @property
    def skipped(self) -> bool:
        """Return whether there were calls since the last copy."""
        return self._calls > 0

    def copied(self, copies_s: Sequence[float], steps_s: Sequence[float]) -> bool:
        """Adapt the interval to the measured costs of a copy.

        Args:
            copies_s: for each rank, the seconds for which the copy has stopped training.
            steps_s: for each rank, the seconds of training per call, or 0 if unknown.

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
    """Return the number of steps per copy: the smallest one within the budget, and at most `LONGEST_S` seconds of
    steps.
    """
    within = math.ceil(copy_s / (share * step_s))
    return max(1, min(within, int(LONGEST_S / step_s)))
