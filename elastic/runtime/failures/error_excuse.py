"""Decides whether an error of user code is one of a worker, or job, that is about to end. Pure.

A process manager that ends a job signals its loader workers too, and a training process raises when one of them dies.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ErrorExcuse:
    """What a worker knows of its own end."""

    leaving: str = ""  # why it asked to leave
    checkpoint_wanted: bool = False  # the driver wants a last checkpoint
    excused: bool = False  # an error has counted as one of the world since

    @property
    def near(self) -> bool:
        return bool(self.leaving) or self.checkpoint_wanted

    def leaves(self, reason: str) -> None:
        """This worker got SIGTERM."""
        self.leaving, self.excused = reason, False

    def wants_checkpoint(self) -> None:
        """The driver said so, perhaps again."""
        if not self.checkpoint_wanted:
            self.checkpoint_wanted, self.excused = True, False

    def excuse(self) -> bool:
        """User code raised: whether another world may follow. Once; what raises again is not excused."""
        excused = self.near and not self.excused
        self.excused = self.excused or excused
        return excused
