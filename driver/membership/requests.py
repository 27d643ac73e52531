"""Decides what becomes of an operator's request: another size, a host without workers, a worker that is to leave.

Deterministic. Nothing is lost by any of them: who leaves does so at a check that all have agreed on. Each is answered
with what follows, or with why nothing does.

    scale    the largest world has this size from here on; of those that are too many the last ranks leave
    drain    nobody is started on the host; its workers leave if enough others stay, as at a notice of its end
    remove   the worker leaves, and its slot stays empty unless there are too few, as after a SIGTERM
"""

from __future__ import annotations

from elastic.driver.events import (
    AnswerRequest,
    DrainRequested,
    Event,
    RemoveRequested,
    ScaleRequested,
)
from elastic.driver.membership.part import Part
from elastic.driver.membership.roster import WorkerRecord, WorkerStage
from elastic.driver.reasons import Fact, Reason, Why, because
from elastic.driver.settings import UNBOUNDED

NAMED = 4  # drained hosts


class OperatorRequests(Part):
    """Has no fields of its own: the wanted size is the staff's, drained hosts are the slots'."""

    def handle(self, event: Event) -> bool:
        """Whether it was a request."""
        match event:
            case ScaleRequested(request, workers):
                self._answer(request, *self._scale(workers))
            case DrainRequested(request, host, off):
                self._answer(request, *(self._refill(host) if off else self._drain(host)))
            case RemoveRequested(request):
                self._answer(request, *self._remove(event))
            case _:
                return False
        return True

    def _answer(self, request: int, done: bool, reason: Reason) -> None:
        self.actions.add(AnswerRequest(request, done, reason))

    # ---- scale -----------------------------------------------------------------------------------------------------

    def _scale(self, workers: int) -> tuple[bool, Reason]:
        least, before = self.settings.workers_min, self.staff.workers_max
        if not self.settings.elastic:
            return False, because(Why.FIXED_SIZE)
        if workers < least:
            return False, because(Why.BELOW_LEAST, workers=workers, least=least)
        self.staff.asked = workers
        for record in self.roster.in_plans():
            if record.leaving is not None and record.leaving.kind is Why.SCALED_DOWN:
                record.leaving = None  # of those that have not left yet some may stay
        leave = self._thin_out(workers)
        slots = self.staff.slots.open(self.actions.now)
        had = None if before == UNBOUNDED else before
        drained = self.staff.slots.drained_hosts if slots < workers else []
        kept_out: dict[str, Fact] = {}
        if drained:
            kept_out = {"drained": ", ".join(drained[:NAMED]), "more": len(drained[NAMED:])}
        return True, because(
            Why.SCALED, workers=workers, before=had, slots=slots, leave=leave, **kept_out
        )

    def _thin_out(self, workers: int) -> int:
        """Asks those that are too many to leave, and returns how many they are."""
        surplus = self._surplus(workers)
        for record in surplus:
            why = because(Why.SCALED_DOWN, workers=workers)
            self.staff.ask_to_leave(record, why, self.worlds.world.places)
        return len(surplus)

    def _surplus(self, workers: int) -> list[WorkerRecord]:
        """The surplus workers: the last ranks among the members, and the most recently started among the others."""
        staying = [record for record in self.roster.in_plans() if record.leaving is None]
        places = self.worlds.world.places
        members = [record for record in staying if record.worker in places]
        members.sort(key=lambda record: places[record.worker].rank)
        others = [record for record in staying if record.worker not in places]
        others.sort(key=lambda record: (record.stage is WorkerStage.STARTING, record.started_at))
        kept = min(len(members), workers)
        return [*members[kept:], *others[workers + self.settings.standbys - kept :]]

    # ---- drain and remove ------------------------------------------------------------------------------------------

    def _drain(self, host: str) -> tuple[bool, Reason]:
        refused = self._no_host(host)
        if refused is not None:
            return False, refused
        self.staff.slots.drain(host)
        why = because(Why.DRAINED, host=host)
        here = [each for each in self.roster.hosts.get(host, {}).values() if each.in_plans]
        for record in here:
            if record.leaving is None:
                record.noticed = True
                self.staff.ask_to_leave(record, why, self.worlds.world.places)
        enough = self.roster.staying() >= self.settings.workers_min
        least = None if enough else self.settings.workers_min
        return True, because(Why.DRAINS, host=host, workers=len(here), least=least)

    def _refill(self, host: str) -> tuple[bool, Reason]:
        refused = self._no_host(host)
        if refused is not None:
            return False, refused
        self.staff.slots.refill(host)
        for record in self.roster.hosts.get(host, {}).values():
            leaving = record.leaving
            if record.in_plans and leaving is not None and leaving.kind is Why.DRAINED:
                record.leaving, record.noticed = None, False
        self._thin_out(self.staff.workers_max)  # it may have been made smaller meanwhile
        return True, because(Why.DRAINS_NO_MORE, host=host)

    def _no_host(self, host: str) -> Reason | None:
        hosts = self.staff.slots.hosts
        if not self.settings.elastic:
            return because(Why.FIXED_SIZE)
        if host in hosts or self.roster.hosts.get(host):
            return None
        more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
        return because(Why.NO_SUCH_HOST, host=host, hosts=", ".join(hosts[:8]) + more)

    def _remove(self, event: RemoveRequested) -> tuple[bool, Reason]:
        worker, record = str(event.worker), self.roster.get(event.worker)
        if not self.settings.elastic:
            return False, because(Why.FIXED_SIZE)
        if record is None or not record.in_plans:
            return False, because(Why.NO_SUCH_WORKER, worker=worker)
        if record.hurried:
            return False, because(Why.LEAVES_ALREADY, worker=worker, leaving=record.leaving)
        self.staff.leave(record, because(Why.REMOVED), self.worlds.world.places)
        return True, because(Why.REMOVES, worker=worker)
