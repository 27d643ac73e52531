"""The lines about slots whose workers have ended: the first at once, and one for those that follow within a second."""

from __future__ import annotations

import asyncio
from collections import Counter

from elastic.driver.reasons import Reason, Why
from elastic.driver.sinks import Log

TOGETHER_S = 1.0


class ExitLines:
    """Of one job. Called in the event loop's thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._more: list[Reason] | None = None  # None: no line within the last second

    def shares(self, about: Reason | None) -> bool:
        """Whether this is said in a line that comes later, with others."""
        if about is None or about.kind is not Why.SLOT_COOLS:
            return False
        if self._more is not None:
            self._more.append(about)
            return True
        self._more = []
        asyncio.get_running_loop().call_later(TOGETHER_S, self.say)
        return False

    def say(self) -> None:
        """Say what is waiting."""
        more, self._more = self._more or [], None
        if len(more) == 1:
            self._log("warning", str(more[0]))
            return
        alike = Counter((str(each.facts["exit"]), each.facts["wait_s"]) for each in more)
        for (ended, wait_s), workers in alike.items():
            noun, slots = ("worker", "its slot") if workers == 1 else ("workers", "their slots")
            text = f"{workers} more {noun} ended with {ended}; {slots} may return in {wait_s:g} s"
            self._log("warning", text)
