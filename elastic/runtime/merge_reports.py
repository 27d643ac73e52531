"""Rate limit of the reports of DiLoCo merges to the driver. Pure: times are passed in, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

MERGE_REPORT_S = 1.0  # interval in seconds between reports of merges with the same islands
NAMES_S = 60.0  # interval in seconds between reports of the islands' names


@dataclass
class MergeReports:
    """Rate limiter for the reports of DiLoCo merges."""

    due_at: float = 0.0  # earliest time of the next report
    absent: list[str] = field(default_factory=list)  # absent islands in the last report
    # generation and islands' names of the last report that contained the names
    names: tuple[int, list[str]] = field(default_factory=lambda: (0, []))
    # time of the next report with the names, which are repeated for a new driver
    names_due_at: float = 0.0
    waited_s: float = 0.0  # seconds waited for merges since the last report

    def due(
        self, now: float, absent: list[str], names: tuple[int, list[str]], waited_s: float
    ) -> tuple[float, bool] | None:
        """Record a merge. Return None if no report is due.

        Args:
            now: current time in seconds.
            absent: islands for which the merge did not wait.
            names: generation, and names of all islands.
            waited_s: seconds waited for the merge.

        Returns:
            The seconds waited since the last report, and whether the report contains the names.
        """
        self.waited_s += waited_s
        if now < self.due_at and absent == self.absent:
            return None
        named = names != self.names or now >= self.names_due_at
        waited = self.waited_s
        if named:
            self.names_due_at = now + NAMES_S
        self.due_at, self.absent, self.names, self.waited_s = (
            now + MERGE_REPORT_S,
            absent,
            names,
            0.0,
        )
        return waited, named
