"""Optimizer steps and samples per second of a job, estimated from the reports of one worker.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from elastic.driver.monitoring.commit_rate import CommitRate
from elastic.driver.monitoring.stalls import Stalls
from elastic.protocol.messages import Worker


class StepRate:
    """Estimator of a job's optimizer steps and samples per second. Times are in seconds on the caller's clock."""

    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls
        self._rate = CommitRate(stalls)
        self._worker: Worker | None = None
        self._steps = 0
        self._batch: int | None = None
        self._reported_at: float | None = None
        # Total number of steps: the sum of the differences between successive reports of the same worker.
        self._made = 0
        self._over_s = 0.0

    def record(self, worker: Worker, steps: int | None, batch: int | None, now: float) -> None:
        """Record that ``worker`` has completed ``steps`` steps, of ``batch`` samples each, since its start.

        A report of another worker, or with fewer steps than before, starts a new measurement.
        """
        if steps is None:
            return
        if worker != self._worker or steps < self._steps:
            self._worker, self._rate = worker, CommitRate(self._stalls)
            self._steps = -1
        else:
            self._made += steps - self._steps
            assert self._reported_at is not None, "the worker has reported before"
            self._over_s += now - self._reported_at
        self._batch, self._reported_at = batch, now
        if steps > self._steps:
            self._steps = steps
            self._rate.committed(steps, now)

    @property
    def reported_at(self) -> float | None:
        """Return the time of the last report with a number of steps, or None."""
        return self._reported_at

    def steps(self, now: float) -> float | None:
        """Return the current number of steps per second, or None if unknown.

        Without new steps, the rate decays to 0 as in `CommitRate.value`.
        """
        return self._rate.value(now)

    def mean(self) -> float | None:
        """Return the mean number of steps per second of the whole job, or None if unknown.

        The time includes recoveries and stalls.
        """
        return self._made / self._over_s if self._over_s > 0 else None

    def samples(self, now: float, size: int) -> float | None:
        """Return the samples per second of ``size`` workers, or None if unknown."""
        steps = self.steps(now)
        return None if steps is None or self._batch is None else steps * self._batch * size
