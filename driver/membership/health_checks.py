"""Decisions about health checks. A worker is admitted when the check of its slot has passed. Pure: no I/O, no clock.

The check runs while the worker starts (`processes.health_check_run`). Until the check has passed, init() of the worker
is not answered, so the worker cannot become ready. Only the first world waits for a check, and only briefly. A slot
with a failed check cools down like any slot with a failed worker, and its next worker is checked again. The slot is
never given up, because an operator may repair its host.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic.driver.events import HealthOutcome, WorkerHealthChecked
from elastic.driver.membership.records.roster import WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.reasons import Reason, ReasonKind, because


class HealthChecks(Part):
    """Handler of the results of health checks."""

    def checked(self, event: WorkerHealthChecked) -> None:
        record = self.roster.get(event.worker)
        if record is None or not record.unchecked or record.killed_for:
            return  # The worker has exited or is already checked. Agents repeat results.
        if record.stage is WorkerStage.DISMISSED:
            return
        if event.outcome is HealthOutcome.PASSED:
            self._passed(record)
        else:
            self._failed(record, event)

    def deadlines(self) -> Iterator[float]:
        """Yield the times of the next checks."""
        # The held workers are in the order of their deadlines.
        held = self.roster.first_at(WorkerStage.HELD)
        yield from (each.check_by for each in held if not each.killed_for)

    def overdue(self) -> None:
        """Handle missing results as checks that timed out."""
        for record in self.roster.at(WorkerStage.HELD):
            if self.actions.expired(record.check_by) and not record.killed_for:
                line = "no result has arrived"
                self._failed(
                    record, WorkerHealthChecked(record.worker, HealthOutcome.TIMED_OUT, None, line)
                )

    def _passed(self, record: WorkerRecord) -> None:
        record.unchecked = False
        if self.staff.slots.passed_check(record.slot):
            host, slot = record.slot
            self.actions.log(
                "info", f"health check of {host}:{slot} passed; the slot is used again"
            )
        if record.stage is WorkerStage.HELD:
            self.worlds.welcome(record)

    def _failed(self, record: WorkerRecord, event: WorkerHealthChecked) -> None:
        """Reject the worker, and start the cooldown of its slot.

        The result is logged only if it differs from the slot's previous result.
        """
        slots, worker = self.staff.slots, record.worker
        reason = because(
            ReasonKind.UNHEALTHY,
            slot=f"{worker.host}:{worker.slot}",
            outcome=event.outcome.value,
            code=event.code,
            line=event.line,
        )
        before = slots.unhealthy.get(record.slot)
        wait = slots.failed_check(record.slot, self.actions.now, reason)
        if not self.settings.elastic:
            self.worlds.end(1, reason)
        level = "debug" if before is not None and _alike(before, reason) else "error"
        self.actions.log(level, f"{reason}; next check in {wait:g} s", reason)
        self.staff.discard(record, reason)


def _alike(one: Reason, other: Reason) -> bool:
    return all(one.facts.get(name) == other.facts.get(name) for name in ("outcome", "code"))
