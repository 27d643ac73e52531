"""How long the others wait for the member that waits least itself, by what all say of their collectives. Pure.

A worker says now and then how many collectives it has completed, and how long it was inside them. In a collective the
last one to come waits least, so of two means the difference is what one waited for the other. A report is a mean over
5 to 30 s: a histogram of them tells a rank that is always late from one that was late once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.protocol.messages import Worker

WORKERS = 64  # that others have waited for; of more nothing is kept
WAITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass
class Histogram:
    """How many were no larger than each of ``bounds``, in seconds, and the others."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum_s += seconds * times

    def cumulative(self) -> Iterator[tuple[str, float]]:
        total = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield bound, float(total)


class StragglerWaits:
    """Of one job. Each report costs the same, but for one of the member that is waited for."""

    def __init__(self) -> None:
        self.by_worker: dict[Worker, Histogram] = {}
        self._means: dict[Worker, float] = {}  # seconds in a collective, of the present world
        self._last: Worker | None = None  # who waits least

    def new_world(self) -> None:
        self._means.clear()
        self._last = None

    def gone(self, worker: Worker) -> None:
        self.by_worker.pop(worker, None)
        self._means.pop(worker, None)
        if self._last == worker:
            self._last = min(self._means, key=self._means.__getitem__, default=None)

    def paced(self, worker: Worker, waited_s: float, collectives: int) -> None:
        """One worker's last seconds."""
        if collectives <= 0:
            return
        before, mean = self._means.get(worker), waited_s / collectives
        self._means[worker] = mean
        if self._last is None or mean < self._means[self._last]:
            self._last = worker
        elif worker == self._last and before is not None and mean > before:
            self._last = min(self._means, key=self._means.__getitem__)
        if worker == self._last:
            return
        if self._last not in self.by_worker and len(self.by_worker) >= WORKERS:
            return
        waited = self.by_worker.setdefault(self._last, Histogram(WAITS_S))
        waited.add(mean - self._means[self._last], collectives)
