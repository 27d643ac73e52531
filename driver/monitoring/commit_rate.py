"""Commit rate of a job, in commits per second. The rate decays while no commits are made.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from elastic.driver.monitoring.stalls import STALL_S, Stalls

MEASURED_S = 2.0  # minimum interval between two measurements, in seconds
REPORTED_S = (
    11.0  # seconds; twice the interval (about 5 s) at which rank 0 reports its newest commit
)


class CommitRate:
    """Commit rate of one job. Times are in seconds on the caller's clock."""

    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls
        # Time of the last measurement, and the total number of commits at that time.
        self._since: tuple[float, int] | None = None
        self._measured: float | None = None
        self._newest_at = 0.0

    def committed(self, total: int, now: float) -> tuple[float, float] | None:
        """Record that the job has now made ``total`` commits.

        Returns:
            If this commit ends a measurement, the start of the measured interval and the commits per second in it.
            Otherwise None. An interval never begins before the end of the last stall.
        """
        self._newest_at = now
        if self._since is None:
            self._since = now, total
            return None
        since, had = self._since
        if self._stalls.past:
            since = max(since, self._stalls.past[-1].until)
        if now - since < MEASURED_S:
            return None
        self._since, self._measured = (now, total), (total - had) / (now - since)
        return since, self._measured

    def value(self, now: float) -> float | None:
        """Return the current number of commits per second, or None if unknown.

        While ranks wait in a collective, no commits are possible. Once they have waited longer than the usual interval
        between two commits, the rate decays linearly to 0 within STALL_S seconds. The rate is also 0 if no newer commit
        was reported for two usual intervals.
        """
        rate = self._measured
        if not rate:
            return rate
        late = now - self._newest_at > max(REPORTED_S, 2 / rate)
        if late or self._stalls.current(now) is not None:
            return 0.0
        since = self._stalls.waits_since
        idle_s = 0.0 if since is None else now - since - 1 / rate
        return rate * min(1.0, max(0.0, 1.0 - idle_s / STALL_S))
