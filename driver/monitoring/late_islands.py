"""Record of the elastic.DiLoCo merges that did not wait for a late island, by island. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.driver.events import WorkerMerged

ISLANDS = 64  # maximum number of islands whose names are kept


@dataclass
class LateIsland:
    """Island that was late for at least one merge. Times are in seconds on the caller's clock."""

    merges: int  # number of merges that did not wait for the island
    first_at: float
    last_at: float
    late: bool  # whether the island was late for the last merge


class LateIslands:
    """Record of the late islands of one job, from the reports of rank 0.

    Rank 0 reports at most one merge per second, unless the set of late islands has changed. A merge that is not
    reported therefore has the same late islands as the previous report.

    Attributes:
        names: islands of the last reported world.
        waited_s: seconds for which merges delayed the inner steps of rank 0.
        islands: the islands that were late for any merge, by name.
        more: whether more islands were late than are stored in ``islands``.
    """

    def __init__(self) -> None:
        self.last: WorkerMerged | None = None
        self.names: list[str] = []
        self.waited_s = 0.0
        self.islands: dict[str, LateIsland] = {}
        self.more = False

    def receive(self, event: WorkerMerged, now: float) -> None:
        before, self.last = self.last, event
        self.names = event.names or self.names
        self.waited_s += event.waited_s
        unreported = 0 if before is None else max(0, event.merges - before.merges - 1)
        for name in () if before is None else before.absent:
            if name in self.islands:
                self.islands[name].merges += unreported
                self.islands[name].late = name in event.absent
        for name in event.absent:
            known = self.islands.get(name)
            if known is not None:
                known.merges += 1
                known.last_at, known.late = now, True
            elif len(self.islands) < ISLANDS:
                self.islands[name] = LateIsland(1, now, now, True)
            else:
                self.more = True

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each late island and each island of the last reported world.

        A row contains the number of merges that did not wait for the island, and whether the last merge is among them.
        """
        rows = []
        for name in dict.fromkeys([*self.names, *self.islands]):
            known = self.islands.get(name)
            merges, late = (0, False) if known is None else (known.merges, known.late)
            rows.append({"name": name, "late_merges": merges, "late": late})
        return rows
