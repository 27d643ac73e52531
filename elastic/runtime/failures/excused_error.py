"""Detection of exceptions in user code that occur because this worker or job is ending. Pure: no I/O, no clock.

A process manager that ends a job also signals the job's loader workers, and a training process raises an exception when
one of its loader workers exits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ErrorExcuse:
    """Signs that this worker or its job is about to end."""

    leaving: str = ""  # reason why this worker has requested to leave; empty if it has not
    checkpoint_wanted: bool = False  # whether the driver has requested a last checkpoint
    excused: bool = False  # whether `excuse` has returned True since the last sign

    @property
    def near(self) -> bool:
        return bool(self.leaving) or self.checkpoint_wanted

    def leaves(self, reason: str) -> None:
        """Record that this worker received SIGTERM."""
        self.leaving, self.excused = reason, False

    def wants_checkpoint(self) -> None:
        """Record that the driver has requested a last checkpoint. Later requests have no effect."""
        if not self.checkpoint_wanted:
            self.checkpoint_wanted, self.excused = True, False

    def excuse(self) -> bool:
        """Return whether this worker may rejoin the job after an exception in user code.

        Returns True for the first exception after a sign that the worker or the job is about to end. Any later
        exception ends the worker.
        """
        excused = self.near and not self.excused
        self.excused = self.excused or excused
        return excused
