"""Results of benchmarks: medians with quartiles, ratios by round, and limits. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    def times(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.median * factor, self.high * factor)

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} .. {self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(low, median, high)


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the ratio of each round, because other load in a round affects both variants."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def order(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of the variants in a round.

    Each name is first as often as last, and before its neighbours as often as after them, so that a variant that leaves
    the machine busy does not always affect the same other variant.
    """
    first = turn // 2 % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated[::-1] if turn % 2 else rotated


@dataclass(frozen=True)
class Mark:
    """Limit of a result: an upper one, or a lower one with ``at_least``. ``value`` is the measured result."""

    what: str
    wanted: float
    value: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    def sentence(self) -> str:
        sign = ">=" if self.at_least else "<="
        outcome = "met" if self.met else "missed"
        return f"{self.what}: mark {sign} {self.wanted:g}: {shown(self)} {outcome}"


def shown(mark: Mark) -> str:
    """Format the value with enough digits to show on which side of the limit it is."""
    for digits in range(2, 6):
        text = f"{mark.value:.{digits}f}"
        if float(text) != mark.wanted:
            return text
    return f"{mark.value:g}"


def size_text(size: int) -> str:
    """Format a number of bytes as 64 KB, 10 MB."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
