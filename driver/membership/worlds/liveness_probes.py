"""Liveness probes of standbys: only standbys that answer at the beginning of a gathering can join the next world.

Pure: no I/O, no clock. A standby may wait for hours, and its agent checks only four times a second whether it can run.
Without a probe, the next world could include a standby that has just been stopped, and all members would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.protocol.messages import Worker

ANSWER_S = 0.05  # time limit for answers after all other workers are ready, in seconds


@dataclass
class LivenessProbes:
    """State of the liveness probes of one job. Times are in seconds on the caller's clock."""

    # standbys that were probed in this gathering and have not answered yet
    asked: set[Worker] = field(default_factory=set)
    # standbys that missed the deadline and have not answered since then
    silent: set[Worker] = field(default_factory=set)
    # deadline for answers; not None iff all other workers are ready and an answer is pending
    by: float | None = None

    def ask(self, standbys: Sequence[Worker]) -> None:
        """Start probing the standbys. Called at the beginning of a gathering."""
        self.asked, self.by = set(standbys), None

    def wait_for_others(self) -> None:
        """Reset the deadline for answers, because another worker is no longer ready."""
        self.by = None

    def answered(self, worker: Worker) -> None:
        """Record that a standby has answered, possibly late, or that its process has exited."""
        self.asked.discard(worker)
        self.silent.discard(worker)

    def awaited(self, now: float) -> bool:
        """Return whether the gathering must still wait for answers. Called when all other workers are ready.

        Standbys that have missed the deadline are marked as silent.
        """
        if self.by is None and self.asked:
            self.by = now + ANSWER_S
        if self.by is not None and (now >= self.by or not self.asked):
            self.silent |= self.asked
            self.asked, self.by = set(), None
        return self.by is not None
