"""Values that workers reported with `elastic.report`, for the report page: numbers over time, and the latest texts.

Pure: no I/O, no clock.

For each name, only the values of the lowest reporting rank are kept, because the other ranks usually report similar
values. When a series exceeds POINTS, every second point is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = 12
POINTS = 2000
TEXT = 4000  # maximum number of characters of a text
STEP = "step"  # name under which a script reports its current step
STEPS = "steps"  # name of the total number of steps, which is not plotted


class Series:
    """Values reported under one name, over time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # points: time in seconds since 1970, and value
        self.points: list[tuple[float, float]] = []
        self.first = math.nan
        self.last = math.nan
        self.count = 0
        self._every = 1

    def add(self, at: float, value: float) -> None:
        """Append a value to the series."""
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
    """Reported values of one job."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.texts: dict[str, str] = {}
        self.steps = 0  # number of distinct steps that were reported
        # number of reported steps that were repeated because the job resumed from an earlier commit
        self.again = 0
        self._step: float | None = None
        self._highest = -math.inf

    def report(self, rank: int, metrics: Mapping[str, Any], at: float) -> None:
        """Record one report.

        Args:
            at: time of the report, in seconds since 1970.
        """
        for name, value in metrics.items():
            if isinstance(value, str):
                if name in self.texts or len(self.texts) < NAMES:
                    self.texts[name] = value[:TEXT]
            elif isinstance(value, int | float) and not isinstance(value, bool):
                self._number(rank, name, float(value), at)

    def shown(self) -> dict[str, Series]:
        """Return the series to plot, without step counters, which are used only to count steps."""
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
        """Record a reported step number, to count steps and repeated steps.

        A script reports a step just before it commits. A repetition of only the last reported step is not counted,
        because no committed work was lost.
        """
        before, self._step = self._step, step
        if step > self._highest:
            self._highest = step
            self.steps += 1
        if before is not None:
            self.again += max(0, round(before - step))
