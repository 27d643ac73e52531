"""Interface of the sources of preemption notices. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SourceError(Exception):
    """Error raised when a source does not respond as documented. The source is queried again later."""


@dataclass(frozen=True)
class PreemptionNotice:
    """Notice that this machine will be reclaimed.

    Args:
        at: time at which the machine ends, in seconds since 1970 on this machine's clock, or None if unknown.
    """

    text: str  # text for the log: the source, and what it announced
    at: float | None


class NoticeSource(Protocol):
    """Source of preemption notices. All methods are called in one thread. Each must return within a limited time."""

    name: str
    pause_s: float  # interval between two queries, in seconds

    def here(self) -> bool:
        """Return whether this machine has such a source.

        Must return within about a second, and must not raise an exception.
        """

    def look(self) -> PreemptionNotice | None:
        """Return the current notice, or None.

        Raises:
            SourceError: the source did not respond as documented.
        """

    def released(self) -> None:
        """Acknowledge the notice, because the machine is no longer needed.

        Raises:
            SourceError: the source rejected the acknowledgement.
        """

    def hint(self) -> str:
        """Return a message for the operator, or an empty string. Each message is returned only once."""
