"""Decides whether a measured quantity is flat. Pure.

The first half of a run is ignored: caches fill, allocators find their size. In the second half each sample is taken
relative to the median of the samples with a world of the same size, because a larger world has more sockets. The slope
is the Theil-Sen estimator, the median of the slopes between all pairs of samples, so that a single peak has little
influence. Growth is the slope times the length of that half; a curve is flat if its growth is within the larger of two
allowances, one absolute and one proportional to the quantity.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PAIRS_LIMIT = 300  # most samples for slopes; of more, every n-th is taken
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Quantity:
    """A measured quantity. ``allowed`` is its absolute growth over the second half, ``share`` the one relative to
    its size.
    """

    key: str
    called: str
    unit: str
    allowed: float
    share: float


QUANTITIES = (
    Quantity("rss_mb", "memory", "MB", 4.0, 0.02),
    Quantity("fds", "descriptors", "", 3.0, 0.05),
    Quantity("threads", "threads", "", 1.0, 0.05),
    Quantity("sockets", "sockets", "", 3.0, 0.05),
    Quantity("shm", "shm segments", "", 0.5, 0.0),
)


@dataclass(frozen=True)
class GrowthCurve:
    """One quantity of one process. ``at`` has seconds in ascending order, ``sizes`` the sizes of the world."""

    who: str
    quantity: Quantity
    at: list[float]
    values: list[float]
    sizes: list[int]

    @property
    def growth(self) -> float:
        """Growth over the second half."""
        half = len(self.at) // 2
        at, values, sizes = self.at[half:], self.values[half:], self.sizes[half:]
        usual = {
            size: statistics.median(v for v, of in zip(values, sizes, strict=True) if of == size)
            for size in set(sizes)
        }
        relative = [value - usual[size] for value, size in zip(values, sizes, strict=True)]
        return slope(at, relative) * (at[-1] - at[0]) if at else 0.0

    @property
    def allowed(self) -> float:
        half = self.values[len(self.values) // 2 :]
        size = statistics.median(half) if half else 0.0
        return max(self.quantity.allowed, self.quantity.share * size)

    @property
    def flat(self) -> bool:
        return self.growth <= self.allowed

    def sparkline(self, width: int = 24) -> str:
        """Return a sparkline from the least to the greatest value; a column is the mean of its samples."""
        if not self.values:
            return ""
        width = min(width, len(self.values))
        edges = [len(self.values) * n // width for n in range(width + 1)]
        means = [statistics.fmean(self.values[a:b]) for a, b in itertools.pairwise(edges)]
        least, span = min(means), max(means) - min(means)
        # A nearly constant curve must not look like a strongly varying one.
        span = max(span, 0.01 * max(abs(least), 1.0))
        return "".join(BARS[min(7, int(8 * (mean - least) / span))] for mean in means)


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Return the Theil-Sen slope per second; 0 for fewer than two samples."""
    step = max(1, len(at) // PAIRS_LIMIT)
    points = list(zip(at, values, strict=True))[::step]
    slopes = [
        (later[1] - point[1]) / (later[0] - point[0])
        for number, point in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > point[0]
    ]
    return statistics.median(slopes) if slopes else 0.0
