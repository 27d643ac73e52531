"""Decide whether etcd is available, and return the lines to log about this. Pure: no I/O, no clock.

A short silence is not a problem: if a member of etcd dies, the next one is used, and an election takes a second. A line
is logged only after ``grace_s`` seconds without any answer, and another one when etcd answers again.
"""

from __future__ import annotations

from elastic.driver.reasons import Reason, ReasonKind, because

Line = tuple[str, Reason]  # level and reason to log


class Availability:
    """Record of whether etcd is available."""

    def __init__(self, name: str, now: float, *, grace_s: float, gap_s: float) -> None:
        self._name = name
        self._grace_s = grace_s
        self._gap_s = gap_s
        self._answered_at = now
        self._returned_at: float | None = None
        self._away = False

    def answered(self, now: float) -> Line | None:
        """Record an answer and return the line to log, if any."""
        silent_s = now - self._answered_at
        self._answered_at = now
        if silent_s >= self._gap_s:
            self._returned_at = now
        if not self._away:
            return None
        self._away = False
        return "info", because(ReasonKind.STORE_BACK, store=self._name, silent_s=silent_s)

    def failed(self, reason: str, now: float) -> Line | None:
        """Record a failed connection or request and return the line to log, if any."""
        if self._away or now - self._answered_at < self._grace_s:
            return None
        self._away = True
        return "warning", because(ReasonKind.STORE_SILENT, store=self._name, text=reason)

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last answer."""
        return now - self._answered_at

    def unsettled_s(self, now: float, settle_s: float) -> float:
        """Return the seconds until etcd has been available for ``settle_s`` after a silence.

        0 if this time is over, or if etcd was never silent. Within this time, a key that disappeared may return,
        because its lease may have expired only because it could not be renewed.
        """
        if self._returned_at is None:
            return 0.0
        return max(0.0, self._returned_at + settle_s - now)
