"""Detect a world without progress in which no rank waits for another rank. Its ranks may be in infinite loops.

Pure: no I/O, no clock.

Members report their number of completed steps every half minute. If no member completes a step for many times the usual
interval, a warning with the script line of each member is logged once. No worker is fenced, because the script may be
running a long evaluation or download.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LEAST_S = 90.0  # three intervals between reports, in seconds
TIMES = 20.0  # number of usual intervals without a step that count as a lack of progress
LOCATE_S = 2.0  # seconds for members to report their script lines
INTERVALS = 9  # number of reports that determine the usual interval
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
        """Record a member's report on its steps.

        Args:
            steps: number of steps that the member completed in the last ``over_s`` seconds.
            over_s: length in seconds of the period that the report covers, which ends now.
            now: current time, in seconds.

        Returns:
            Seconds without a completed step if a warning about them was logged before this report, otherwise None.
        """
        idle_s = now - over_s - self._since if self.told else None
        self._intervals = [*self._intervals, over_s / steps][-INTERVALS:]
        self.begin(now)
        return idle_s

    def ask(self, now: float) -> None:
        self.asked, self.due = True, now + LOCATE_S

    def sentence(self, lines: Iterable[tuple[int, str]], now: float) -> str:
        """Return the warning about the lack of progress. It is logged once, until a step completes.

        Args:
            lines: for each script line, such as ``train.py:12``, the ranks executing it. Empty if unknown.
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
