"""How many optimizer steps and samples a second a job trains now, by what its first worker tells. Pure."""

from __future__ import annotations

from elastic.driver.monitoring.commit_rate import CommitRate
from elastic.driver.monitoring.stalls import Stalls
from elastic.protocol.messages import Worker


class StepRate:
    """Of one job. Times are those of the caller's clock."""

    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls
        self._rate = CommitRate(stalls)
        self._worker: Worker | None = None
        self._steps = 0
        self._batch: int | None = None
        self._told_at = 0.0
        # Between two reports of one worker, all in all.
        self._made = 0
        self._over_s = 0.0

    def told(self, worker: Worker, steps: int | None, batch: int | None, now: float) -> None:
        """``worker`` has made ``steps`` steps since it began, of ``batch`` samples each. Another worker, or fewer steps
        than before, begin a new measurement.
        """
        if steps is None:
            return
        if worker != self._worker or steps < self._steps:
            self._worker, self._rate = worker, CommitRate(self._stalls)
            self._steps = -1
        else:
            self._made += steps - self._steps
            self._over_s += now - self._told_at
        self._batch, self._told_at = batch, now
        if steps > self._steps:
            self._steps = steps
            self._rate.committed(steps, now)

    def steps(self, now: float) -> float | None:
        """None: not known yet. Falls to 0 while none are made, as `CommitRate.value` does."""
        return self._rate.value(now)

    def mean(self) -> float | None:
        """Steps per second of the whole job, recoveries and stalls included. None: not known."""
        return self._made / self._over_s if self._over_s > 0 else None

    def samples(self, now: float, size: int) -> float | None:
        """Of ``size`` workers together. None: not known."""
        steps = self.steps(now)
        return None if steps is None or self._batch is None else steps * self._batch * size
