"""Counts of what a fuzzer has tried and found, by kind, with the slowest input and the memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import psutil
from rich import box
from rich.table import Table

FINDINGS = 20  # maximum number of findings that are kept


@dataclass
class Tally:
    """Counts for one target: inputs and results."""

    target: str
    tried: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)  # of those, accepted as valid messages
    worst_s: float = 0.0  # longest time for one input
    findings: list[str] = field(default_factory=list)

    def note(self, what: str, *, taken: bool, seconds: float = 0.0) -> None:
        self.tried[what] += 1
        self.taken[what] += taken
        self.worst_s = max(self.worst_s, seconds)

    def found(self, text: str) -> None:
        if len(self.findings) < FINDINGS:
            self.findings.append(f"{self.target}: {text}")

    @property
    def total(self) -> int:
        return self.tried.total()


def memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def table(tallies: list[Tally]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("what was fed")
    shown.add_column("how it was corrupted")
    for name in ("tried", "taken", "refused"):
        shown.add_column(name, justify="right")
    for tally in tallies:
        target = tally.target
        for what, tried in sorted(tally.tried.items()):
            taken = tally.taken[what]
            shown.add_row(target, what, f"{tried:,}", f"{taken:,}", f"{tried - taken:,}")
            target = ""
        taken = tally.taken.total()
        refused = tally.total - taken
        shown.add_row(
            "",
            "all",
            f"{tally.total:,}",
            f"{taken:,}",
            f"{refused:,}",
            style="bold",
            end_section=True,
        )
    return shown
