"""Decisions about when a planned change starts, and at which safepoint all members stop for it. Pure: no I/O, no clock.

Every member reports the number of safepoints that it has passed, and then waits at its next safepoint. All members of
a group continue to the safepoint after the largest number that the group has reported, which none of them has passed,
and stop there. Usually all members are one group. Islands that train independently are groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker

# seconds without a commit before the waiting workers are logged; doubles after each log line
REMIND_S = 30.0


@dataclass
class PlannedChange:
    """Current or most recent planned change.

    Fields ending in ``_s`` are durations in seconds. Other times are in seconds on the caller's clock.
    """

    settings: Settings
    number: int = 0
    by: float | None = None  # deadline for the members' answers, or for all members to stop
    # number of the safepoint at which a worker stops: the safepoint of its group
    checks: dict[Worker, int] = field(default_factory=dict)
    not_before: float = 0.0
    silent: set[Worker] = field(default_factory=set)  # members that have not answered yet
    began_at: float = 0.0
    # seconds after the start of the change at which the waiting workers are logged next
    remind_after_s: float = REMIND_S
    # number of safepoints that a member has passed, and the name of its group
    _answers: dict[Worker, tuple[int, str]] = field(default_factory=dict)
    _settle_by: float | None = None

    def wanted(self, now: float, *, more_coming: bool) -> float | None:
        """Return None if a change may start now, otherwise the time at which to decide again.

        Args:
            now: current time, in seconds.
            more_coming: whether more workers are about to join.
        """
        if now < self.not_before:
            return self.not_before
        if more_coming:
            if self._settle_by is None:
                self._settle_by = now + self.settings.settle_s
            if now < self._settle_by:
                return self._settle_by
        return None

    def unwanted(self) -> None:
        self._settle_by = None

    def prepare(self, now: float, members: Iterable[Worker]) -> None:
        """Begin a change, for which each member is asked how many safepoints it has passed."""
        self.number += 1
        self.by = now + self.settings.prepare_s
        self.began_at, self.remind_after_s = now, REMIND_S
        self.silent = set(members)
        self._answers, self.checks = {}, {}
        self._settle_by = None

    def answer(self, worker: Worker, check: int, group: str = "") -> None:
        self._answers[worker] = check, group
        self.silent.discard(worker)

    def stop(self, now: float, members: Iterable[Worker]) -> dict[int, list[Worker]]:
        """Return the members, which must have answered, by the number of the safepoint at which they stop."""
        last: dict[str, int] = {}
        for check, group in self._answers.values():
            last[group] = max(check, last.get(group, check))
        stops: dict[int, list[Worker]] = {}
        for worker in members:
            _, group = self._answers[worker]
            self.checks[worker] = check = last[group] + 1
            stops.setdefault(check, []).append(worker)
        self.by = now + self.settings.elastic_timeout_s
        return stops

    @property
    def remind_at(self) -> float:
        return self.began_at + self.remind_after_s

    def over(self) -> None:
        self.by = None
        self._answers, self.checks = {}, {}

    def put_off(self, now: float) -> None:
        """Postpone the next change after an unsuccessful one, so that the members are not interrupted too often."""
        self.not_before = now + 2 * self.settings.prepare_s
