"""Interface of the sources of preemption notices. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SourceError(Exception):
    """Error raised when a source does not respond as documented. The source is queried again later."""


@dataclass(frozen=True)
class PreemptionNotice:
    """Notice that this machine will end.

    Args:
        at: time of the end in seconds since 1970 on this machine's clock, or None if unknown.
    """

    text: str  # name of the source, and the content of its notice
    at: float | None


class NoticeSource(Protocol):
    """Source of preemption notices. All its methods are called in one thread, and limit their own time."""

    name: str
    pause_s: float  # interval between queries

    def here(self) -> bool:
        """Return whether the source exists on this machine, within about a second. Never raises."""

    def look(self) -> PreemptionNotice | None:
        """Return the current notice, or None.

        Raises:
            SourceError: the source did not answer as documented.
        """

    def released(self) -> None:
        """Acknowledge the notice, because the machine is no longer needed.

        Raises:
            SourceError: the source rejected the acknowledgement.
        """

    def hint(self) -> str:
        """Return information for the operator, or an empty string. Each piece of information is returned only once."""
