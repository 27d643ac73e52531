"""Decides which standbys are counted for the next world: those that answer when a gathering begins. Pure.

A standby waits for hours, and its agent looks four times a second whether it can run. One that was stopped a moment ago
would be taken into a world that then waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.protocol.messages import Worker

ANSWER_S = 0.05  # after all others are ready


@dataclass
class SignsOfLife:
    """Liveness probes of one job. Times are seconds on the caller's clock."""

    asked: set[Worker] = field(default_factory=set)  # in this gathering, and not answered yet
    silent: set[Worker] = field(default_factory=set)  # did not answer in time, and have not since
    by: float | None = None  # not None iff everybody else is ready and an answer is awaited

    def ask(self, standbys: Sequence[Worker]) -> None:
        """A gathering begins."""
        self.asked, self.by = set(standbys), None

    def heard(self, worker: Worker) -> None:
        """Record an answer, perhaps a late one, or the end of a process."""
        self.asked.discard(worker)
        self.silent.discard(worker)

    def awaited(self, now: float) -> bool:
        """Everybody else is ready: whether to wait for an answer. Those that do not come in time become silent."""
        if self.by is None and self.asked:
            self.by = now + ANSWER_S
        if self.by is not None and (now >= self.by or not self.asked):
            self.silent |= self.asked
            self.asked, self.by = set(), None
        return self.by is not None
