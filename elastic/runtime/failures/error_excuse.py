"""Decides whether an error of user code is a consequence of the end of this worker or job. Pure: no I/O, no clock.

A process manager that ends a job also signals its loader workers, and a training process raises when one of them exits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ErrorExcuse:
    """Collects signs that this worker or its job is about to end."""

    leaving: str = ""  # reason of the worker's request to leave
    checkpoint_wanted: bool = False  # the driver has requested a last checkpoint
    excused: bool = False  # an error was already excused

    @property
    def near(self) -> bool:
        return bool(self.leaving) or self.checkpoint_wanted

    def leaves(self, reason: str) -> None:
        """Record that this worker received SIGTERM."""
        self.leaving, self.excused = reason, False

    def wants_checkpoint(self) -> None:
        """Record that the driver has requested a last checkpoint. The request may be repeated."""
        if not self.checkpoint_wanted:
            self.checkpoint_wanted, self.excused = True, False

    def excuse(self) -> bool:
        """Return whether another world may follow an error of user code. Returns True only once, so that the next
        error is not excused.
        """
        excused = self.near and not self.excused
        self.excused = self.excused or excused
        return excused
