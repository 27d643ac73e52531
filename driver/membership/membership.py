"""Decisions about which workers train together. Deterministic: no clock, network or logger. See docs/architecture.md.

    GATHERING --all expected are ready--> TRAINING --worker lost / collective failed--> GATHERING
        ^                                  |  ^
        |                          newcomer ready, or a member leaves
        |                                  v  |  canceled
        +--all stopped-- STOPPING <--all answered-- PREPARING

    TRAINING --a member returned--> ENDING --all returned--> DONE         any phase --> DONE (failed)

Every world has a generation number, and every event about a world carries it. Each handler drops events of older
generations. The world shrinks only after a lost worker is dead: either its agent has reported the exit, or the driver
has fenced the unreachable worker.

This module routes each event to the part that handles it, and runs the checks that follow each event. The parts are
`worlds` (transitions between phases), `worker_reports` (reports of workers), `failures` (failed worlds and dead
workers), `reconnect` (repeated reports after a lost connection), `frozen` and `stuck` (workers that delay the others),
`preemption_notices` (preemption), `operator_requests` (requests of operators), `worker_pool` (processes), and
`root_cause` (attribution of failures).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from elastic.driver import events
from elastic.driver.membership.failure_detection.frozen import Frozen
from elastic.driver.membership.failure_detection.stuck import Stuck
from elastic.driver.membership.failures import Failures
from elastic.driver.membership.health_checks import HealthChecks
from elastic.driver.membership.operator_requests import OperatorRequests
from elastic.driver.membership.preemption_notices import Notices
from elastic.driver.membership.reconnect import Reconnects
from elastic.driver.membership.records.roster import Roster, WorkerStage
from elastic.driver.membership.worker_reports import IllegalEvent, WorkerReports
from elastic.driver.membership.worlds.deadlines import Deadlines
from elastic.driver.membership.worlds.root_cause import describe_exit
from elastic.driver.membership.worlds.stop import Stop
from elastic.driver.membership.worlds.worlds import JobFinished, Phase, Worlds
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Place, Worker

__all__ = ["IllegalEvent", "Membership", "Phase", "describe_exit", "may_defer"]

# Reports that all workers send at about the same time.
SIMULTANEOUS = (
    events.WorkerConnected,
    events.WorkerReady,
    events.WorkersReady,
    events.WorkerResumed,
    events.WorkersResumed,
    events.WorkerSpent,
)


def may_defer(event: events.Event) -> bool:
    """Return whether `Membership.handle` may receive this event with ``more``."""
    return isinstance(event, SIMULTANEOUS)


class Membership:
    """Membership of one job.

    Pass each event and its time to `handle`, and perform the returned actions in order.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # the most recent events, for error messages
        self.story: deque[events.Event] = deque(maxlen=30)
        self.worlds = Worlds(settings)
        self.failures = Failures(self.worlds)
        self.reconnections = Reconnects(self.worlds)
        self.frozen = Frozen(self.worlds)
        self.reports = WorkerReports(self.worlds, self.frozen)
        self.stuck = Stuck(self.worlds)
        self.notices = Notices(self.worlds)
        self.stop = Stop(self.worlds)
        self.deadlines = Deadlines(self.worlds)
        self.health = HealthChecks(self.worlds)

    # ---- public state ----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.worlds.phase

    @property
    def roster(self) -> Roster:
        """Return the records of all live worker processes."""
        return self.worlds.roster

    @property
    def generation(self) -> int:
        return self.worlds.generation

    @property
    def prepares(self) -> bool:
        """Return whether the world of an elastic job is outside elastic.run, so that training has not begun."""
        return self.settings.elastic and bool(self.members) and not self.worlds.world.running

    @property
    def members(self) -> list[Worker]:
        """Return the members of the last world in rank order, including dead ones."""
        return self.worlds.members

    @property
    def over(self) -> bool:
        """Return whether the outcome of the job is decided."""
        return self.worlds.over

    @property
    def verdict(self) -> events.EndJob | None:
        """Outcome of the job, or None until it is decided."""
        return self.worlds.verdict

    @property
    def workers_max(self) -> int:
        """Return the size of the largest world, as last requested."""
        return self.worlds.staff.workers_max

    @property
    def drained(self) -> list[str]:
        """Return the hosts that were drained by an operator."""
        slots = self.worlds.staff.slots
        return [host for host in slots.hosts if slots.drained(host)]

    @property
    def stragglers(self) -> frozenset[Worker]:
        """Workers that make progress but are slower than the others."""
        return self.stuck.stragglers

    def place_of(self, worker: Worker) -> Place | None:
        """Return the ranks and sizes of a worker in the last published world, or None if the worker is not a member."""
        return self.worlds.world.places.get(worker)

    def next_deadline(self) -> float | None:
        """Return the time at which `handle` must receive TimePassed if no other event occurs earlier, or None.

        The time, in seconds, is always later than the last event.
        """
        return None if self.over else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        yield from self.deadlines.all()
        yield from self.notices.deadlines()
        yield from self.stop.deadlines()
        yield from self.health.deadlines()
        others = (*self.stuck.deadlines(), self.frozen.next_deadline())
        yield from (at for at in others if at is not None)

    # ---- one event -------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event, now: float, *, more: bool = False) -> list[events.Action]:
        """Return the actions that an event causes, in order.

        Args:
            event: the event.
            now: time of the event, in seconds.
            more: whether another event is already queued. Decisions that depend on all workers are then
                postponed until the last of the queued events, because they take as long as the rest of `handle`.

        Raises:
            IllegalEvent: the event is impossible in the current state.
        """
        self.story.append(event)
        self.worlds.actions.begin(now)
        try:
            if self.over:
                self._after_the_end(event)
            else:
                self._dispatch(event)
                if not more:
                    self._overdue()
                    self.worlds.advance()
                    self.stuck.watch()
                    self.notices.watch()
                    self.stop.watch()
        except JobFinished:
            pass
        except IllegalEvent as illegal:
            story = "\n  ".join(map(str, self.story))
            where = f"in phase {self.phase.value}; the story:\n  {story}"
            raise IllegalEvent(f"{event}: {illegal}, {where}") from None
        return self.worlds.actions.decided

    def _dispatch(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerSpent):
            return  # No decision depends on this event, which is the most frequent one while members train.
        self.stop.observe(event)
        # Check the most frequent events first. No event belongs to two parts.
        if self.reports.handle(event) or self.stuck.handle(event):
            return
        if any(
            part.handle(event) for part in (self.failures, self.frozen, self.notices, self.health)
        ):
            return
        match event:
            case events.WorkerReconnected():
                self.reconnections.reconnected(event)
            case events.HostsChanged(hosts):
                self.notices.listed(hosts)
                self.health.bandwidth.listed(hosts)
                self.worlds.staff.announce(hosts, self.worlds.world.places, fixed=event.fixed)
            case events.HostsQueued(hosts=waiting):
                self.worlds.staff.slots.queued = waiting
            case events.HostReported():
                self.frozen.host_is_back(event.host)
                for gone in self.reconnections.not_there(event):
                    self.failures.handle(gone)
                self.notices.reported(event)
            case events.DriverRestarted():
                # The discovery of the new driver reports the number of queued hosts again.
                self.worlds.staff.slots.queued = 0
                self.reconnections.restarted()
                self.deadlines.restarted()
                self.frozen.restarted()
                self.stuck.restarted()
            case events.CheckpointMade():
                self.worlds.give_up.checkpoint_made()
                self.worlds.exceptions.checkpoint_made()
                self.notices.checkpoint_made(event)
            case events.StopRequested():
                self.stop.requested(event)
            case events.ScaleRequested() | events.DrainRequested() | events.RemoveRequested():
                OperatorRequests(self.worlds).handle(event)
            case events.TimePassed() | events.WorkerFoundMistake() | events.WorkerMerged():
                pass  # No action is needed, because deadlines are checked after every event.
            case _:
                raise IllegalEvent("no part handles this event: add a handler")

    def _overdue(self) -> None:
        for record in self.worlds.staff.overdue():
            if record.stage is not WorkerStage.DISMISSED:
                record.stage = WorkerStage.DISMISSED
                worker, killed_for = str(record.worker), record.killed_for
                alive = because(ReasonKind.LOST_ALIVE, worker=worker, killed_for=killed_for)
                self.frozen.given_up(record, alive)
        self.frozen.give_up_hosts()
        self.frozen.fence()
        self.notices.overdue()
        self.health.overdue()
        self.deadlines.overdue()

    def _after_the_end(self, event: events.Event) -> None:
        match event:
            case events.WorkerExited():
                self.roster.remove(event.worker)
            case events.WorkerConnected() | events.WorkerReady() if event.worker in self.roster:
                self.worlds.staff.release(self.roster[event.worker], because(ReasonKind.JOB_ENDED))
            case events.WorkersReady(workers):
                for worker in workers:
                    if worker in self.roster:
                        reason = because(ReasonKind.JOB_ENDED)
                        self.worlds.staff.release(self.roster[worker], reason)
            case events.WorkerReconnected() if self._has_finished(event.worker):
                # The script is still running code after training.
                self.reconnections.reconnected(event)
            case events.WorkerReconnected():
                self.worlds.actions.add(events.LetGo(event.worker, because(ReasonKind.JOB_ENDED)))
            case events.HostReported():
                for gone in self.reconnections.not_there(event):
                    self.roster.remove(gone.worker)
            case events.DriverRestarted() if self.verdict is not None:
                self.worlds.actions.add(self.verdict)
            case (
                events.ScaleRequested(request)
                | events.DrainRequested(request)
                | events.RemoveRequested(request)
            ):
                self.worlds.actions.add(
                    events.AnswerRequest(request, False, because(ReasonKind.JOB_OVER))
                )
            case events.WorkerFrozen() if event.worker in self.roster:
                record = self.roster[event.worker]
                if not record.frozen:
                    named = f"{self.worlds.named(record)}, process {record.pid},"
                    text = (
                        "the outcome of the job is decided, and the job ends once this process exits:"
                        " resume the process or kill it"
                    )
                    self.worlds.actions.log("warning", f"{named} is frozen ({event.how}); {text}")
                record.frozen = event.how or "not able to run"
            case events.WorkerThawed() if event.worker in self.roster:
                self.roster[event.worker].frozen = ""
            case _:
                pass

    def _has_finished(self, worker: Worker) -> bool:
        record = self.roster.get(worker)
        return record is not None and record.stage is WorkerStage.FINISHED

    def check(self) -> None:
        """Assert the invariants. Tests call this method after every event."""
        self.stuck.check()
        assert not any(self.roster[w].unchecked for w in self.members if w in self.roster)
        slots = {record.slot for record in self.roster.values()}
        assert len(slots) == len(self.roster), "two live processes in one slot"
        assert len(set(self.members)) == len(self.members)
        live = self.worlds.live()
        leaving = sum(record.leaving is not None for record in live)
        assert len(live) <= self.worlds.staff.workers_max + leaving
        deadline = self.next_deadline()
        assert deadline is None or deadline > self.worlds.actions.now, "a deadline in the past"
        if self.phase in (Phase.TRAINING, Phase.PREPARING):
            assert all(record.stage is WorkerStage.MEMBER for record in live), live
