"""Division of shards among ranks by measured speed.

Pure: all ranks compute the same division from the same numbers.

Ranks exchange their seconds per shard after the second step of a world and after every `PERIOD`-th step. All ranks pass
these numbers to `LoadBalancer.exchanged`. Measurements are noisy, so a division changes only if the new one is faster
by `GAIN` in `PATIENCE` consecutive exchanges. Each recent change raises the required gain by `MORE_GAIN`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

PERIOD = 4  # number of steps between two exchanges
WINDOW = 12  # number of latest steps over which the median is taken
GAIN = 0.06  # minimum difference in step time, relative to the step time of the faster division
MORE_GAIN = 0.04  # increase of the required gain for each recent change
# Limit of the required gain, so that a rank that has become fast again gets its shards back.
MOST_GAIN = 0.2
RECENT = 25  # a change counts as recent for this number of exchanges
PATIENCE = 2

Division = tuple[int, ...]  # number of shards of each rank


def even(shards: int, ranks: int) -> Division:
    """Divide the shards evenly: the numbers per rank differ by at most one.

    If there are more ranks than shards, the last ranks get none.
    """
    least, larger = divmod(shards, ranks)
    return tuple(least + (rank < larger) for rank in range(ranks))


def fastest(seconds: Sequence[float], shards: int) -> Division:
    """Return the division with the shortest step time, with at least one shard per rank.

    Each shard is assigned to the rank that would finish it first. In a tie, the lower rank is chosen. This assignment
    is optimal because all shards cost the same.

    Args:
        seconds: seconds per shard of each rank, all positive.
        shards: number of shards, at least the number of ranks.
    """
    sizes = [1] * len(seconds)
    for _ in range(shards - len(sizes)):
        first = min(range(len(sizes)), key=lambda rank: (sizes[rank] + 1) * seconds[rank])
        sizes[first] += 1
    return tuple(sizes)


def step_s(seconds: Sequence[float], division: Division) -> float:
    """Return the duration of a step in seconds, which is the duration of its slowest rank."""
    return max(each * size for each, size in zip(seconds, division, strict=True))


def known(seconds: Sequence[float]) -> list[float]:
    """Return positive seconds per shard for all ranks.

    A rank without a measurement (0.0) gets the mean of the other ranks. The list is empty if no rank has measured.
    """
    measured = [each for each in seconds if 0.0 < each < math.inf]
    if not measured:
        return []
    mean = sum(measured) / len(measured)
    return [each if 0.0 < each < math.inf else mean for each in seconds]


class SpeedWindow:
    """Sliding window over this rank's seconds per shard in its latest steps.

    The first step of the process is excluded, because it includes warm-up.
    """

    def __init__(self) -> None:
        # durations of the latest steps, or None before the first step
        self._steps: deque[float] | None = None

    def took(self, seconds: float, shards: int) -> None:
        """Record the time of a step.

        Args:
            seconds: total time of this rank's shards in the step, in seconds.
            shards: number of these shards.
        """
        if self._steps is None:
            self._steps = deque(maxlen=WINDOW)
        elif shards and seconds > 0.0:
            self._steps.append(seconds / shards)

    @property
    def median_s(self) -> float:
        """Return the median of the seconds per shard, or 0.0 without measurements."""
        return statistics.median(self._steps) if self._steps else 0.0


class LoadBalancer:
    """Balancer of the shards in one world. All ranks make the same calls in the same order.

    Attributes:
        division: number of shards by rank.
        pending: the division to adopt at the next commit, or None if it does not change.
    """

    def __init__(self, shards: int, ranks: int) -> None:
        self.shards = shards
        self.division = even(shards, ranks)
        self.pending: Division | None = None
        self._steps = 0
        # whether batches are fetched before the commit; None before the first commit after a step
        self._fetched_early: bool | None = None
        self._exchanges = 0
        self._insisted = 0  # number of consecutive exchanges in which another division was faster
        self._changes: list[int] = []  # numbers of the exchanges with recent changes

    def due(self) -> bool:
        """Count a step. Return whether the ranks exchange their speeds after this step."""
        self._steps += 1
        # With no more shards than ranks, each rank has at most one shard and nothing can be balanced.
        several = 1 < len(self.division) < self.shards
        return several and (self._steps == 2 or self._steps % PERIOD == 0)

    @property
    def may_change(self) -> bool:
        """Return whether this rank has committed in this world, and has never fetched the next step before a commit."""
        return self._fetched_early is False

    def exchanged(self, seconds: Sequence[float], may_change: bool = True) -> None:
        """Decide on a new division from the numbers of all ranks.

        Args:
            seconds: seconds per shard of each rank; 0.0 for a rank that has not measured yet.
            may_change: whether `may_change` is true on all ranks. If not, the division stays the same, because a script
                might otherwise compute other shards than it has fetched.
        """
        speeds = known(seconds)
        if not speeds or self.pending is not None:
            # If a change is pending, these speeds were measured before it.
            return
        self._exchanges += 1
        self._changes = [each for each in self._changes if each > self._exchanges - RECENT]
        gain = min(MOST_GAIN, GAIN + MORE_GAIN * len(self._changes))
        better = fastest(speeds, self.shards)
        if step_s(speeds, self.division) <= (1.0 + gain) * step_s(speeds, better):
            self._insisted = 0
            return
        self._insisted += 1
        if self._insisted >= PATIENCE and may_change:
            self.pending, self._insisted = better, 0
            self._changes.append(self._exchanges)

    def committed(self, fetched: bool = False) -> bool:
        """Adopt the pending division. Return whether one was pending.

        Args:
            fetched: whether this rank has already fetched the next step or read the numbers of its shards.
        """
        if self._steps:
            self._fetched_early = bool(self._fetched_early) or fetched
        if self.pending is None:
            return False
        self.division, self.pending = self.pending, None
        return True
