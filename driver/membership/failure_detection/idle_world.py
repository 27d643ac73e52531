"""Detection of a world that makes no progress although no rank waits for another, for example in an infinite loop.

Pure: no I/O, no clock.

Members report their number of completed steps every half minute. If no member completes a step for TIMES times the
usual interval, a warning with the script line of each member is logged once. No worker is fenced, because the script
may be running a long evaluation or download.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LEAST_S = 90.0  # minimum time without a step before the warning, in seconds; three report intervals
TIMES = 20.0  # multiple of the usual interval between steps that counts as a lack of progress
LOCATE_S = 2.0  # seconds that members have for reporting their script lines
INTERVALS = 9  # number of latest reports from which the usual interval is computed
NAMED = 8


@dataclass
class IdleWorld:
    """Detector of a lack of progress in the world of a job.

    Attributes:
        due: time of the next check, or None until a report arrives.
    """

    due: float | None = None
    asked: bool = False  # whether the members were asked for their script lines
    told: bool = False
    _since: float = 0.0
    _intervals: list[float] = field(default_factory=list)

    def begin(self, now: float) -> None:
        """Restart the measurement when a world begins, ranks wait for each other, or a phase is marked as long."""
        self._since, self.asked, self.told = now, False, False
        self.due = now + self._limit_s() if self._intervals else None

    def completed(self, steps: int, over_s: float, now: float) -> float | None:
        """Record a member's report of its completed steps.

        Args:
            steps: number of steps that the member completed in the last ``over_s`` seconds.
            over_s: length in seconds of the period that the report covers, which ends now.
            now: current time, in seconds.

        Returns:
            Seconds without a completed step before this report if the warning was logged, otherwise None.
        """
        idle_s = now - over_s - self._since if self.told else None
        self._intervals = [*self._intervals, over_s / steps][-INTERVALS:]
        self.begin(now)
        return idle_s

    def ask(self, now: float) -> None:
        self.asked, self.due = True, now + LOCATE_S

    def sentence(self, lines: Iterable[tuple[int, str]], now: float) -> str:
        """Return the warning about the lack of progress. The warning is not repeated until a step completes.

        Args:
            lines: pairs of a rank and the script line that it executes, such as ``train.py:12``, or an empty string.
            now: current time, in seconds.
        """
        self.told, self.due = True, None
        places = [f"rank {rank} is at {line or 'an unknown line'}" for rank, line in lines]
        more = [f"{len(places) - NAMED} more ranks"] if len(places) > NAMED else []
        usual_s = self._usual_s()
        return (
            f"no step completed on any rank for {now - self._since:.0f} s (usually {usual_s:.2g} s), and no rank waits"
            f" for another: {', '.join([*places[:NAMED], *more])}"
        )

    def _limit_s(self) -> float:
        return max(LEAST_S, TIMES * self._usual_s())

    def _usual_s(self) -> float:
        return sorted(self._intervals)[len(self._intervals) // 2]
