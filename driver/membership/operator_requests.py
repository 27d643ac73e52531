"""Handling of operator requests: scale the job, drain a host, remove a worker. Deterministic.

No progress is lost, because workers leave at a safepoint that all members have agreed on. The answer to a request
describes its effect or the reason for refusing it.

    scale    set the size of the largest world; surplus members leave, highest ranks first
    drain    start no workers on the host; its workers leave if enough others stay, as after a preemption notice;
             off: allow new workers there again, also in quarantined slots
    remove   make the worker leave; its slot stays empty unless there are too few workers, as after SIGTERM
"""

from __future__ import annotations

from elastic.driver.events import (
    AnswerRequest,
    DrainRequested,
    Event,
    RemoveRequested,
    ScaleRequested,
)
from elastic.driver.membership.records.roster import WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.reasons import Fact, Reason, ReasonKind, because
from elastic.driver.settings import UNBOUNDED

NAMED = 4  # maximum number of drained hosts named in an answer
# Departure reasons that `drain --off` cancels.
LEFT_OUT = (ReasonKind.DRAINED, ReasonKind.QUARANTINED)


class OperatorRequests(Part):
    """Handler of operator requests.

    The handler is stateless: the worker pool stores the requested size, and `Slots` stores the drained hosts.
    """

    def handle(self, event: Event) -> bool:
        """Handle an operator's request. Return False for other events."""
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
            return False, because(ReasonKind.FIXED_SIZE)
        if workers < least:
            return False, because(ReasonKind.BELOW_LEAST, workers=workers, least=least)
        self.staff.asked = workers
        for record in self.roster.in_plans():
            if record.leaving is not None and record.leaving.kind is ReasonKind.SCALED_DOWN:
                record.leaving = None  # Cancel departures due to earlier scale requests.
        leave = self._thin_out(workers)
        slots = self.staff.slots.open(self.actions.now)
        had = None if before == UNBOUNDED else before
        drained = self.staff.slots.drained_hosts if slots < workers else []
        kept_out: dict[str, Fact] = {}
        if drained:
            kept_out = {"drained": ", ".join(drained[:NAMED]), "more": len(drained[NAMED:])}
        return True, because(
            ReasonKind.SCALED, workers=workers, before=had, slots=slots, leave=leave, **kept_out
        )

    def _thin_out(self, workers: int) -> int:
        surplus = self._surplus(workers)
        for record in surplus:
            why = because(ReasonKind.SCALED_DOWN, workers=workers)
            self.staff.ask_to_leave(record, why, self.worlds.world.places)
        return len(surplus)

    def _surplus(self, workers: int) -> list[WorkerRecord]:
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
        refused = refused or self._nowhere_else(host)
        if refused is not None:
            return False, refused
        self.staff.slots.drain(host)
        why = because(ReasonKind.DRAINED, host=host)
        here = [each for each in self.roster.hosts.get(host, {}).values() if each.in_plans]
        for record in here:
            if record.leaving is None:
                record.noticed = True
                self.staff.ask_to_leave(record, why, self.worlds.world.places)
        enough = self.roster.staying() >= self.settings.workers_min
        least = None if enough else self.settings.workers_min
        return True, because(ReasonKind.DRAINS, host=host, workers=len(here), least=least)

    def _refill(self, host: str) -> tuple[bool, Reason]:
        refused = self._no_host(host)
        if refused is not None:
            return False, refused
        self.staff.slots.refill(host)
        for record in self.roster.hosts.get(host, {}).values():
            leaving = record.leaving
            if record.in_plans and leaving is not None and leaving.kind in LEFT_OUT:
                record.leaving, record.noticed = None, False
        # The requested size may have been reduced in the meantime.
        self._thin_out(self.staff.workers_max)
        return True, because(ReasonKind.DRAINS_NO_MORE, host=host)

    def _no_host(self, host: str) -> Reason | None:
        hosts = self.staff.slots.hosts
        if not self.settings.elastic:
            return because(ReasonKind.FIXED_SIZE)
        if host in hosts or self.roster.hosts.get(host):
            return None
        more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
        return because(ReasonKind.NO_SUCH_HOST, host=host, hosts=", ".join(hosts[:8]) + more)

    def _nowhere_else(self, host: str) -> Reason | None:
        """Return the reason for refusing a drain that could never complete because the host list cannot grow."""
        slots, least = self.staff.slots, self.settings.workers_min
        others = slots.open(self.actions.now, without=host)
        if not slots.fixed or others >= least or slots.drained(host):
            return None
        return because(ReasonKind.NOWHERE_ELSE, host=host, slots=others, least=least)

    def _remove(self, event: RemoveRequested) -> tuple[bool, Reason]:
        worker, record = str(event.worker), self.roster.get(event.worker)
        if not self.settings.elastic:
            return False, because(ReasonKind.FIXED_SIZE)
        if record is None or not record.in_plans:
            return False, because(ReasonKind.NO_SUCH_WORKER, worker=worker)
        if record.hurried:
            return False, because(ReasonKind.LEAVES_ALREADY, worker=worker, leaving=record.leaving)
        self.staff.leave(record, because(ReasonKind.REMOVED), self.worlds.world.places)
        return True, because(ReasonKind.REMOVES, worker=worker)
