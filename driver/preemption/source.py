"""Interface of the sources of preemption notices. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SourceError(Exception):
    """A source did not answer, or not as documented. It is queried again."""


@dataclass(frozen=True)
class PreemptionNotice:
    """Notice that the machine will end. ``at``: seconds since 1970 on this machine's clock; None if unknown."""

    text: str  # the source and its notice
    at: float | None


class NoticeSource(Protocol):
    """Source of preemption notices. It is called from one thread; each call has its own time limit."""

    name: str
    pause_s: float  # interval between queries

    def here(self) -> bool:
        """Return whether this machine has this source. Takes at most about a second, and never raises."""

    def look(self) -> PreemptionNotice | None:
        """Return the current notice, or None.

        Raises:
            SourceError: the source did not answer as documented.
        """

    def released(self) -> None:
        """Called when the machine is no longer needed, to acknowledge the notice.

        Raises:
            SourceError: the source rejects the acknowledgement.
        """

    def hint(self) -> str:
        """Return information for the operator, once; empty if there is none."""
