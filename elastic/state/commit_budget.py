"""Selection of the ``commit()`` calls that copy the state, so that copies take at most a given fraction of time. Pure.

All ranks make the same decision, because it depends only on the number of calls and on costs that the ranks have
exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# maximum training time in seconds between two copies, which a failure would repeat
LONGEST_S = 60.0
_FIRST = 2  # number of initial copies whose cost is ignored, because they also allocate memory
_MARGIN = 1.25  # the interval is changed only if the optimal one differs by more than this factor


class CommitBudget:
    """Interval between the copies of one state in one world.

    Args:
        share: maximum fraction of the time that copies may take, greater than 0.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.every = 1  # number of commit() calls per copy
        self._calls = 0  # number of commit() calls since the last copy
        self._copies = 0

    def due(self) -> bool:
        """Count a commit() call. Return whether it must make a copy."""
        self._calls += 1
        return self._copies == 0 or self._calls >= self.every

    @property
    def skipped(self) -> bool:
        """Return whether commit() was called after the last copy."""
        return self._calls > 0

    def copied(self, copies_s: Sequence[float], steps_s: Sequence[float]) -> bool:
        """Adapt the interval to the measured costs of a copy.

        Args:
            copies_s: seconds for which the copy has stopped training, for each rank.
            steps_s: seconds of training per commit() call, for each rank; 0 if unknown.

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
    """Return the number of steps per copy: the smallest within the budget, but at most `LONGEST_S` seconds of steps."""
    within = math.ceil(copy_s / (share * step_s))
    return max(1, min(within, int(LONGEST_S / step_s)))
