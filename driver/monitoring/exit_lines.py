"""Log lines about slots whose workers exited: the first immediately, and one summary of those that follow closely."""

from __future__ import annotations

from collections.abc import Callable

from elastic.driver.monitoring.debounce_timer import DebounceTimer
from elastic.driver.reasons import Reason, ReasonKind
from elastic.driver.sinks import Log


class ExitLines:
    """Aggregates the exit lines of one job, while ``held()`` in one summary. Called in the event loop's thread."""

    def __init__(self, log: Log, held: Callable[[], bool] = lambda: False) -> None:
        self._log = log
        self._more: list[Reason] | None = None  # None: no summary is pending
        self._timer = DebounceTimer(self.say, held)

    def shares(self, about: Reason | None) -> bool:
        """Return whether a line is deferred to the summary."""
        if about is None or about.kind is not ReasonKind.SLOT_COOLS:
            return False
        self._timer.touch()
        if self._more is not None:
            self._more.append(about)
            return True
        self._more = []
        return False

    def say(self) -> None:
        """Log the pending summary."""
        self._timer.cancel()
        more, self._more = self._more or [], None
        alike: dict[tuple[str, str], list[Reason]] = {}
        for about in more:
            key = str(about.facts["exit"]), f"{about.facts['wait_s']:g}"
            alike.setdefault(key, []).append(about)
        for (ended, wait_s), some in alike.items():
            text = (
                f"{len(some)} more workers ended with {ended}; their slots may return in {wait_s} s"
            )
            self._log("warning", str(some[0]) if len(some) == 1 else text)
