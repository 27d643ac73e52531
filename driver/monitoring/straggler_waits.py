"""Measurement of the time that members wait for the slowest member, from their reports on collectives.

Pure: no I/O, no clock.

Workers regularly report how many collectives they completed and the time spent inside them. The last worker to enter a
collective spends the least time in it, so the difference between the mean times of two workers is the mean time that
one waited for the other. A report covers 5 to 30 s. The histograms of these waiting times show whether a rank is always
late or was late only once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.protocol.messages import Worker

WORKERS = 64  # maximum number of workers with a histogram
WAITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass
class Histogram:
    """Histogram of durations.

    It has one bucket for each upper bound in ``bounds``, in seconds, and one for larger values.
    """

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
    """Histograms of the time that the members of one job wait for the slowest member.

    Recording a report takes constant time, except for reports of the worker that waits least.
    """

    def __init__(self) -> None:
        self.by_worker: dict[Worker, Histogram] = {}
        # mean seconds per collective of each worker in the current world
        self._means: dict[Worker, float] = {}
        self._last: Worker | None = None  # the slowest worker, which is the one that waits least

    def new_world(self) -> None:
        self._means.clear()
        self._last = None

    def gone(self, worker: Worker) -> None:
        self.by_worker.pop(worker, None)
        self._means.pop(worker, None)
        if self._last == worker:
            self._last = min(self._means, key=self._means.__getitem__, default=None)

    def paced(self, worker: Worker, waited_s: float, collectives: int) -> None:
        """Record a worker's report.

        Args:
            worker: the worker.
            waited_s: seconds that it spent in collectives.
            collectives: number of collectives that it completed.
        """
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
