"""Log lines about the exits of workers.

The first exit is logged immediately. Exits that follow shortly are combined into one summary.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.driver.monitoring.debounce_timer import DebounceTimer
from elastic.driver.output_interfaces import Log
from elastic.driver.reasons import Reason, ReasonKind


class ExitLines:
    """Logger of worker exits in one job. ``held`` returns True while more exits are expected, which delays the summary.

    Must be called in the event loop's thread.
    """

    def __init__(self, log: Log, held: Callable[[], bool] = lambda: False) -> None:
        self._log = log
        # exit reasons to summarize, or None if no summary is pending
        self._more: list[Reason] | None = None
        # exit reason in the first line if that line is deferred, otherwise None
        self._first: Reason | None = None
        self._timer = DebounceTimer(self.flush, held)

    def shares(self, level: str, about: Reason | None, *, starting: bool = False) -> bool:
        """Return whether a log line is deferred and becomes part of the summary.

        Only lines about exits are deferred. Before any other line above debug level, the summary is logged, because an
        exit may be the cause of that line.

        Args:
            level: level of the line.
            about: reason in the line, or None.
            starting: whether no world has formed yet. The first line is then deferred as well, because further exits
                may fail the job.
        """
        if about is None or about.kind is not ReasonKind.SLOT_COOLS:
            if level != "debug":
                self.flush()
            return False
        self._timer.touch()
        if self._more is not None:
            self._more.append(about)
            return True
        self._more = []
        self._first = about if starting else None
        return starting

    def job_failed(self) -> None:
        """Log the deferred exits at debug level, because the job has failed at startup.

        Slot cooldowns are omitted, because the job starts no more workers.
        """
        if self._first is None:
            return
        self._timer.cancel()
        for about in [self._first, *(self._more or [])]:
            self._log("debug", f"{about.facts['worker']} ended with {about.facts['exit']}")
        self._first = self._more = None

    def flush(self) -> None:
        """Log the summary of the deferred lines."""
        self._timer.cancel()
        if self._first is not None:
            self._log("warning", str(self._first))
        more, self._more, self._first = self._more or [], None, None
        alike: dict[tuple[str, str], list[Reason]] = {}
        for about in more:
            key = str(about.facts["exit"]), f"{about.facts['wait_s']:g}"
            alike.setdefault(key, []).append(about)
        for (ended, wait_s), some in alike.items():
            text = (
                f"{len(some)} more workers ended with {ended}; their slots are free in {wait_s} s"
            )
            self._log("warning", str(some[0]) if len(some) == 1 else text)
