"""The seam between whoever announces the end of a machine and the watcher. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Trouble(Exception):
    """A source did not answer, or not as it is documented. It is asked again."""


@dataclass(frozen=True)
class Ends:
    """The machine will be gone. ``at``: seconds since 1970 by this machine's clock, None if it is not said."""

    text: str  # who says so, and what
    at: float | None


class Source(Protocol):
    """One that may announce it. Called from one thread; each call returns within its own bound."""

    name: str
    pause_s: float  # between two looks

    def here(self) -> bool:
        """Whether this machine is one of these. Answers within about a second, and never raises."""

    def look(self) -> Ends | None:
        """What is announced now. Raises Trouble."""

    def released(self) -> None:
        """Nobody needs the machine any more: whoever waits for that may be told. Raises Trouble."""

    def hint(self) -> str:
        """Something an operator may want to know, once; empty: nothing."""
