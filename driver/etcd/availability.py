"""Decides when etcd counts as away and when it is back, and what is said about it. Pure.

Silence alone is no trouble: a member that dies is replaced by the next one, an election takes a second. Only after
``grace_s`` without one answer a line is said, and one more when it is over.
"""

from __future__ import annotations

from elastic.driver.reasons import Reason, Why, because

Line = tuple[str, Reason]  # level, and what is to be said


class Contact:
    """What is known of etcd's answers. ``name`` is where it is, for the lines."""

    def __init__(self, name: str, now: float, *, grace_s: float, gap_s: float) -> None:
        self._name = name
        self._grace_s = grace_s
        self._gap_s = gap_s
        self._answered_at = now
        self._returned_at: float | None = None
        self._away = False

    def answered(self, now: float) -> Line | None:
        """It has said something."""
        silent_s = now - self._answered_at
        self._answered_at = now
        if silent_s >= self._gap_s:
            self._returned_at = now
        if not self._away:
            return None
        self._away = False
        return "info", because(Why.STORE_BACK, store=self._name, silent_s=silent_s)

    def failed(self, reason: str, now: float) -> Line | None:
        """It could not be reached, or not be asked."""
        if self._away or now - self._answered_at < self._grace_s:
            return None
        self._away = True
        return "warning", because(Why.STORE_SILENT, store=self._name, text=reason)

    def silent_s(self, now: float) -> float:
        """Since its last answer."""
        return now - self._answered_at

    def unsettled_s(self, now: float, settle_s: float) -> float:
        """How long until it has been back for ``settle_s`` after a silence; 0 if it has, or was never silent.

        Within this time a key that has vanished may come again: its lease ran out because nobody could renew it.
        """
        if self._returned_at is None:
            return 0.0
        return max(0.0, self._returned_at + settle_s - now)
