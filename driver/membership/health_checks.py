"""Handling of health-check results. A worker is admitted when the check of its slot has passed.

Pure: no I/O, no clock.

The check runs while the worker starts (`processes.health_check_run`). The driver does not answer the worker's init()
until the check has passed, so the worker cannot become ready earlier. Only the first world waits for pending checks,
and only briefly. After a failed check, the slot cools down as after a failure of its worker, and the next worker is
checked again. A failed check never disables the slot permanently, because an operator may repair its host. With the
built-in check, `bandwidth` also compares the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic.driver.events import BandwidthMeasured, Event, HealthOutcome, WorkerHealthChecked
from elastic.driver.membership.bandwidth import HostBandwidth
from elastic.driver.membership.records.roster import WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Worlds
from elastic.driver.reasons import Fact, Reason, ReasonKind, because, describe_bandwidth


class HealthChecks(Part):
    """Handler of the results of health checks."""

    def __init__(self, worlds: Worlds) -> None:
        super().__init__(worlds)
        self.bandwidth = HostBandwidth(worlds)

    def handle(self, event: Event) -> bool:
        """Handle the result of a health check or of a bandwidth measurement. Return False for other events."""
        match event:
            case WorkerHealthChecked():
                self.checked(event)
            case BandwidthMeasured():
                self.bandwidth.measured(event)
            case _:
                return False
        return True

    def checked(self, event: WorkerHealthChecked) -> None:
        record = self.roster.get(event.worker)
        if record is None or not record.unchecked or record.killed_for:
            # The worker has exited, or its result was already handled. Agents may repeat results.
            return
        if record.stage is WorkerStage.DISMISSED or self.bandwidth.waits(record):
            return
        if event.outcome is not HealthOutcome.PASSED:
            line = {"outcome": event.outcome.value, "code": event.code, "line": event.line}
            self._failed(record, line)
        elif not self.bandwidth.passed(record):
            self._passed(record)

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which `overdue` must be called."""
        # HELD workers are sorted by deadline.
        held = self.roster.first_at(WorkerStage.HELD)
        yield from (each.check_by for each in held if self._unanswered(each))
        yield from self.bandwidth.deadlines()

    def overdue(self) -> None:
        """Reject workers whose check has timed out, and admit or reject workers whose hosts have been measured."""
        for record in self.roster.at(WorkerStage.HELD):
            if self.actions.expired(record.check_by) and self._unanswered(record):
                outcome, line = HealthOutcome.TIMED_OUT.value, "no result has arrived"
                self._failed(record, {"outcome": outcome, "code": None, "line": line})
        for record, evidence in self.bandwidth.settled():
            if evidence is None:
                self._passed(record)
            else:
                self.bandwidth.reject(record.worker.host)
                outcome, line = HealthOutcome.LOW_BANDWIDTH.value, describe_bandwidth(evidence)
                self._failed(record, {"outcome": outcome, "code": None, "line": line, **evidence})

    def _unanswered(self, record: WorkerRecord) -> bool:
        return not record.killed_for and not self.bandwidth.waits(record)

    def _passed(self, record: WorkerRecord) -> None:
        record.unchecked = False
        if self.staff.slots.passed_check(record.slot):
            host, slot = record.slot
            self.actions.log(
                "info", f"health check of {host}:{slot} passed; the slot is used again"
            )
        if record.stage is WorkerStage.HELD:
            self.worlds.welcome(record)

    def _failed(self, record: WorkerRecord, facts: Mapping[str, Fact]) -> None:
        """Reject a worker whose health check failed, and start the cooldown of its slot.

        The result is logged only if it differs from the slot's previous result.

        Args:
            record: the worker.
            facts: ``outcome``, ``code``, ``line``, and further evidence.
        """
        slots, worker = self.staff.slots, record.worker
        reason = because(ReasonKind.UNHEALTHY, slot=f"{worker.host}:{worker.slot}", **facts)
        before = self._before(record, reason)
        wait = slots.failed_check(record.slot, self.actions.now, reason)
        if not self.settings.elastic:
            self.worlds.end(1, reason)
        level = "debug" if before is not None and _alike(before, reason) else "error"
        self.actions.log(level, f"{reason}; next check in {wait:g} s", reason)
        self.staff.discard(record, reason)

    def _before(self, record: WorkerRecord, reason: Reason) -> Reason | None:
        """Return the previous result of the slot, or of its host if the failure is low bandwidth."""
        unhealthy = self.staff.slots.unhealthy
        if reason.facts["outcome"] == HealthOutcome.LOW_BANDWIDTH.value:
            same = (why for slot, why in unhealthy.items() if slot[0] == record.worker.host)
            return next((why for why in same if _alike(why, reason)), None)
        return unhealthy.get(record.slot)


def _alike(one: Reason, other: Reason) -> bool:
    return all(one.facts.get(name) == other.facts.get(name) for name in ("outcome", "code"))
