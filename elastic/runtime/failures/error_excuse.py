"""Detection of exceptions in user code that result from the end of this worker or job. Pure: no I/O, no clock.

A process manager that ends a job also signals its loader workers, and a training process raises when one of them exits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ErrorExcuse:
    """Record of indications that this worker or its job is about to end."""

    leaving: str = ""  # reason of the worker's request to leave
    checkpoint_wanted: bool = False  # the driver has requested a last checkpoint
    excused: bool = False  # whether excuse() has returned True since the last sign

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
        """Return whether this worker may rejoin the job after an exception in user code.

        Return True for the first exception after an indication that the worker or the job is about to end. Any later
        exception ends the worker.
        """
        excused = self.near and not self.excused
        self.excused = self.excused or excused
        return excused
