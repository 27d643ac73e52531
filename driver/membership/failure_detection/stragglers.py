"""Detection of stragglers, which are slow workers that all other workers wait for. Pure: no I/O, no clock.

Every worker regularly reports the fraction of its time spent in collectives. The remaining time is its busy time. All
workers complete the same number of steps, so a worker's relative speed is the median busy fraction of the other workers
divided by its own. With `elastic.Shards`, a slower worker receives less work and is then as busy as the others. It
counts as a straggler only if it is still slower after that. A worker becomes a straggler when its speed falls below the
factor, and stops being one when its speed exceeds the factor by a margin.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from elastic.driver.settings import STRAGGLER_FACTOR
from elastic.protocol.messages import Worker

# A worker that spends a larger fraction of its time in collectives does not become a straggler: its computed speed may
# be wrong, because the other workers' reports may be older.
LITTLE = 0.1
# A worker stops being a straggler when its speed exceeds this multiple of the factor.
RECOVERS = 1.25
LASTING = 2  # number of consecutive slow reports after which a straggler may be replaced


@dataclass
class Stragglers:
    """Stragglers of one generation. Recording a report takes logarithmic time in the number of members.

    Args:
        factor: speed below which a worker is a straggler, as a fraction of the median speed of the other workers. 0.0
            disables the detection.
    """

    size: int = 0  # number of members of the world
    factor: float = STRAGGLER_FACTOR
    named: frozenset[Worker] = frozenset()  # stragglers according to the last report
    _busy: dict[Worker, float] = field(default_factory=dict)
    # busy fractions of all workers, in ascending order
    _sorted: list[tuple[float, Worker]] = field(default_factory=list)
    # number of consecutive reports in which each straggler was slow
    _reports: dict[Worker, int] = field(default_factory=dict)

    def paced(self, worker: Worker, waited_s: float, over_s: float) -> bool:
        """Record a worker's report. Return whether the set of stragglers has changed.

        Args:
            worker: the worker.
            waited_s: seconds that the worker spent in collectives.
            over_s: seconds that the report covers.
        """
        if over_s <= 0 or self.size < 2:
            return False
        busy = 1.0 - min(1.0, waited_s / over_s)
        if worker in self._busy:
            del self._sorted[bisect_left(self._sorted, (self._busy[worker], worker))]
        insort(self._sorted, (busy, worker))
        self._busy[worker] = busy
        before = self.named
        slowest = takewhile(self._is_slow, (each for _, each in reversed(self._sorted)))
        self.named = frozenset({*slowest, *filter(self._is_slow, before)})
        self._reports = {each: self._reports.get(each, 0) for each in self.named}
        if worker in self.named:
            self._reports[worker] += 1
        return self.named != before

    def speed(self, worker: Worker) -> float | None:
        """Return the speed of a worker as a fraction of the other workers' median speed.

        Returns None if too few workers have reported.
        """
        others = len(self._sorted) - 1
        own = self._busy.get(worker)
        if own is None or others < 1 or 2 * others < self.size - 1:
            return None
        middle = (others - 1) // 2
        if bisect_left(self._sorted, (own, worker)) <= middle:
            # The worker's own value is in the lower half, so the median of the others is one position higher.
            middle += 1
        return self._sorted[middle][0] / own if own else 1.0

    def _is_slow(self, worker: Worker) -> bool:
        speed = self.speed(worker)
        if worker in self.named:
            return speed is not None and speed < min(RECOVERS * self.factor, 1.0)
        return speed is not None and speed < self.factor and 1.0 - self._busy[worker] < LITTLE

    def lasting(self) -> list[Worker]:
        """Return the workers that were stragglers in LASTING or more consecutive reports, slowest first."""
        found = [worker for worker, reports in self._reports.items() if reports >= LASTING]
        return sorted(found, key=lambda worker: (self.speed(worker) or 1.0, worker))

    def sentence(self, name: Callable[[Worker], str]) -> str:
        """Describe the current stragglers in a sentence.

        Args:
            name: function that returns the display name of a worker.
        """
        slow = sorted(self.named)
        if not slow:
            return "no worker is a straggler any more"
        shares = sorted(1.0 - busy for each, busy in self._busy.items() if each not in self.named)
        median = shares[len(shares) // 2] if shares else 0.0
        names = ", ".join(f"{name(w)} waits {1.0 - self._busy[w]:.0%}" for w in slow[:4])
        more = f", and {len(slow) - 4} more" if len(slow) > 4 else ""
        noun = "stragglers" if len(slow) > 1 else "straggler"
        return (
            f"{noun}: {names}{more}; the others wait {median:.0%} of their time in collectives: check for slow"
            " hardware or uneven work"
        )
