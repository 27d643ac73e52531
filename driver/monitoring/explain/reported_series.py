"""What workers reported by `elastic.report`, as far as a page shows it: numbers over time, and the last texts. Pure.

Of each name the reports of the lowest rank that makes any are taken: the others mostly report the same. A series that
grows beyond POINTS keeps every second of its points, again and again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = 12
POINTS = 2000
TEXT = 4000  # characters of one
STEP = "step"  # by this name a script says which step it has come to
STEPS = "steps"  # and of how many: that is no curve


class Series:
    """Of one name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.points: list[tuple[float, float]] = []  # seconds since 1970, value
        self.first = math.nan
        self.last = math.nan
        self.count = 0
        self._every = 1

    def add(self, at: float, value: float) -> None:
        """The next."""
        if not self.count:
            self.first = value
        self.last = value
        if self.count % self._every == 0:
            self.points.append((at, value))
            if len(self.points) > POINTS:
                del self.points[1::2]
                self._every *= 2
        self.count += 1


class ReportedSeries:
    """Of one job."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.texts: dict[str, str] = {}
        self.steps = 0  # different ones, where a script reports its steps
        self.again = 0  # steps that were trained, committed, and trained once more
        self._step: float | None = None
        self._highest = -math.inf

    def report(self, rank: int, metrics: Mapping[str, Any], at: float) -> None:
        """One report; ``at`` in seconds since 1970."""
        for name, value in metrics.items():
            if isinstance(value, str):
                if name in self.texts or len(self.texts) < NAMES:
                    self.texts[name] = value[:TEXT]
            elif isinstance(value, int | float) and not isinstance(value, bool):
                self._number(rank, name, float(value), at)

    def shown(self) -> dict[str, Series]:
        """The numbers over time, without the steps where a script reports them: those are counted."""
        counted = (STEP, STEPS) if self.steps else ()
        return {name: each for name, each in self.series.items() if name not in counted}

    def _number(self, rank: int, name: str, value: float, at: float) -> None:
        known = self.series.get(name)
        if known is None:
            if len(self.series) >= NAMES or not math.isfinite(value):
                return
            known = self.series[name] = Series(rank)
        if rank > known.rank or not math.isfinite(value):
            return
        known.rank = rank
        known.add(at, value)
        if name == STEP:
            self._stepped(value)

    def _stepped(self, step: float) -> None:
        """One is reported just before its commit: so where it comes again at once, nothing was lost."""
        before, self._step = self._step, step
        if step > self._highest:
            self._highest = step
            self.steps += 1
        if before is not None:
            self.again += max(0, round(before - step))
