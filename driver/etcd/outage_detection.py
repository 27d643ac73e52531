"""Detection of etcd outages, and the log lines about them. Pure: no I/O, no clock.

Short outages are not logged: if a member of etcd fails, the client uses the next member, and an election takes about a
second. After ``grace_s`` seconds without a response, a line is logged, and another line when etcd responds again.
"""

from __future__ import annotations

from elastic.driver.reasons import Reason, ReasonKind, because

Line = tuple[str, Reason]  # log level and reason


class Availability:
    """Tracker of the availability of etcd."""

    def __init__(self, name: str, now: float, *, grace_s: float, gap_s: float) -> None:
        self._name = name
        self._grace_s = grace_s
        self._gap_s = gap_s
        self._answered_at = now
        self._returned_at: float | None = None
        self._away = False

    def answered(self, now: float) -> Line | None:
        """Record a response. Return the line to log, or None."""
        silent_s = now - self._answered_at
        self._answered_at = now
        if silent_s >= self._gap_s:
            self._returned_at = now
        if not self._away:
            return None
        self._away = False
        return "info", because(ReasonKind.STORE_BACK, store=self._name, silent_s=silent_s)

    def failed(self, reason: str, now: float) -> Line | None:
        """Record the failure of a connection or request. Return the line to log, or None."""
        if self._away or now - self._answered_at < self._grace_s:
            return None
        self._away = True
        return "warning", because(ReasonKind.STORE_SILENT, store=self._name, text=reason)

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last response."""
        return now - self._answered_at

    def unsettled_s(self, now: float, settle_s: float) -> float:
        """Return the seconds until etcd has been available for ``settle_s`` seconds after an outage.

        Return 0 if this time has passed or no outage occurred. Until then, keys may be missing temporarily, because
        leases could not be renewed during the outage.
        """
        if self._returned_at is None:
            return 0.0
        return max(0.0, self._returned_at + settle_s - now)
