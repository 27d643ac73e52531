"""History of a job, derived from the events and decisions in its journal: losses, causes, and recoveries.

Pure: no I/O, no clock.

Pass each journal entry once, in order, with its time. Memory use is bounded.

The history is a list of incidents. An incident begins with the first sign of trouble: an exit, an exception, a fence, a
lost host, or a world that fails. It ends when all members of the next world have completed their first collective, when
that world also fails, or with the job. Workers lost in this period belong to the incident, and the first lost worker is
considered its cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.driver import events
from elastic.driver.monitoring.change_waits import ChangeWaits
from elastic.driver.monitoring.explain.loss_causes import (
    FOLLOWS,
    Cause,
    Death,
    of_exit,
    of_fence,
    of_raised,
)
from elastic.driver.monitoring.job_rates import JobRates
from elastic.driver.monitoring.job_view import ViewReader
from elastic.driver.monitoring.reported_series import Series
from elastic.driver.monitoring.shard_status import ShardStatus
from elastic.driver.monitoring.straggler_records import SlowWorkers
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import Reason, ReasonKind
from elastic.driver.settings import StartCheckpoint
from elastic.protocol.messages import Commit, Worker

INCIDENTS = 5000  # maximum number of stored incidents; further ones are only counted
# maximum number of stored operator requests, and of stored removals that ended with a kill; further ones are dropped
REQUESTS = 24
SILENCES = 24  # maximum number of stored etcd outages; further ones are only counted
TRACES = 20  # maximum number of distinct tracebacks that are stored
TRACE = 20_000  # maximum number of characters of a traceback


@dataclass
class Incident:
    """Failure in a job and the recovery from it.

    Times are in seconds on the journal's clock.

    Args:
        size: size of the world before the incident.
        size_after: size of the world after the incident.
    """

    at: float
    deaths: list[Death] = field(default_factory=list)
    broke: Reason | None = None
    size: int = 0
    size_after: int | None = None
    newest: Commit | None = None  # newest known commit when the incident began
    # step counter of the state at this commit, or None if the state has none
    newest_step: int | None = None
    commit: Commit | None = None  # commit from which training resumed
    # step counter of the state at this commit, or None if the state has none
    step: int | None = None
    from_checkpoint: bool = False
    uncommitted: bool = False  # whether training restarted from the initial state
    # duration from the cause until all members have completed their first collective
    recovered_ms: float | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    copied_bytes: int = 0
    # partition of the sharded state after the incident, or None
    shards: events.ShardsDivided | None = None
    ended: bool = False  # whether the incident ended the job

    @property
    def spoilt(self) -> bool:
        """Return whether the damaged memory of one worker corrupted the commits of all workers."""
        return self.broke is not None and self.broke.kind is ReasonKind.SPOILT

    @property
    def first(self) -> Death | None:
        """Return the first loss that was not caused by the loss of another worker."""
        own = [death for death in self.deaths if death.cause not in FOLLOWS]
        return min(own or self.deaths, key=lambda death: death.at, default=None)


@dataclass
class StoreOutage:
    """Outage of etcd that began at time ``at``.

    Args:
        back_at: end of the outage, or None if it is not known to have ended.
    """

    at: float
    reason: Reason
    back_at: float | None = None


@dataclass
class Planned:
    """Statistics of planned changes, in which workers join or leave without a loss of steps."""

    count: int = 0
    longest_ms: float = 0.0


class JobHistory(ViewReader):
    """History of one job. ``spent`` accounts for the time, as in the final summary of elasticrun.

    Attributes:
        begins: the checkpoint from which the job begins, or None.
    """

    def __init__(self, spent: TimeSpent, begins: StartCheckpoint | None = None) -> None:
        self.begins = begins
        self.spent = spent
        self.view = spent.view
        self.rates = JobRates(spent)
        self.shards = ShardStatus()
        self.change_waits = ChangeWaits(self.view)
        self.slow = SlowWorkers(self.view)
        self.began: float | None = None
        self.last = 0.0
        self.incidents: list[Incident] = []
        self.more_incidents = 0
        self.planned = Planned()
        # Start of the first world in elastic.run, or of the first world in a fixed-size job.
        self.trained_at: float | None = None
        self.end_at = 0.0
        # loss of a worker after training had succeeded
        self.after: Death | None = None
        # Whether this worker failed inside the training function, so training had ended only on the other workers.
        self.after_raised = False
        self.stop: str | None = None  # reason for the stop request, or None if there was none
        # operator requests: time, request, and whether it was carried out
        self.requests: list[tuple[float, events.Event, bool]] = []
        # workers that were removed but had to be killed: time, worker, reason for the removal, and reason for the kill
        self.overdue: list[tuple[float, Worker, Reason, Reason]] = []
        self.largest = 0
        self.hosts: set[str] = set()
        self.drivers = 1
        # text of an exception that the driver raised because of a bug, or empty
        self.torn_driver: str = ""
        self.store_away: StoreOutage | None = None
        self.silences: list[StoreOutage] = []
        self.more_silences = 0
        self.commits = Series(0)  # number of reported commits
        self._counted = 0
        # For each slot, the incarnation of the last worker whose loss was recorded.
        self._recorded: dict[tuple[str, int], int] = {}
        # Workers that were asked to leave, or were killed because they were not needed, and the reasons.
        self._going: dict[Worker, Reason] = {}
        self._open: Incident | None = None
        self._traces: set[str] = set()
        self._running = False  # whether the current world is a world of elastic.run
        self._event: events.Event = events.TimePassed()  # the last event
        self.view.follow(self)

    @property
    def uncommitted(self) -> bool:
        """Whether the job has made no commit and did not start from a checkpoint."""
        return self.begins is None and self.view.uncommitted

    # ---- updates ---------------------------------------------------------------------------------------------------

    def adopted(self, now: float) -> None:
        # After a driver failover, the job does not begin from a checkpoint: the workers hold newer commits.
        self.begins = None
        self.began = self.last = now
        self.hosts.update(worker.host for worker in self.view.workers)
        self.largest = len(self.view.ranks)
        self._running = not self.view.prepares
        self.trained_at = now if self._running else None

    def trouble(self, reason: Reason, now: float) -> None:
        """Record a problem outside the job, such as an outage of etcd."""
        if reason.kind is ReasonKind.STORE_SILENT:
            self.store_away = StoreOutage(now, reason)
            if len(self.silences) < SILENCES:
                self.silences.append(self.store_away)
            else:
                self.more_silences += 1
        elif reason.kind is ReasonKind.STORE_BACK and self.store_away is not None:
            self.store_away.back_at = now
            self.store_away = None

    def bug(self, error: str) -> None:
        """Record that the driver raised an exception while it handled an event."""
        self.torn_driver = error

    def go_on(self, now: float) -> None:
        """Advance the current time of a running job without an event."""
        if self.began is not None and self.view.end is None and now > self.last:
            self.last = now
            self.spent.go_on(now)

    # ---- queries ---------------------------------------------------------------------------------------------------

    @property
    def code(self) -> int | None:
        """Return the exit code of the job, or None while the job runs."""
        end = self.view.end
        if end is None:
            return None
        failed = self.after is not None or end.reason.facts.get("strict")
        return end.code or (1 if failed else 0)

    @property
    def last_incident(self) -> Incident | None:
        """Return the incident that is in progress, otherwise the last one, or None if there was none."""
        return self._open or (self.incidents[-1] if self.incidents else None)

    def losses(self) -> list[Death]:
        """Return the worker losses of all incidents, in chronological order."""
        return [death for incident in self.incidents for death in incident.deaths]

    def in_trouble(self) -> bool:
        """Return whether an incident is in progress."""
        return self._open is not None

    # ---- private ---------------------------------------------------------------------------------------------------

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        self.began = now if self.began is None else self.began
        self.last, self._event = now, event
        self.shards.note(event, actions)
        if self.view.commits != self._counted:
            self._counted = self.view.commits
            self.commits.add(now, float(self._counted))
        match event:
            case events.WorkerReady(running=running) | events.WorkersReady(running=running):
                self._running = self._running or running
            case events.WorkerRaised(worker):
                self._lost(of_raised(event, now, self._rank(worker)), now)
            case events.WorkerQuit(worker, _, code, call) if code:
                facts = {"call": call} if call else {}
                death = Death(worker, now, Cause.EXIT_CODE, self._rank(worker), code, facts=facts)
                self._lost(death, now)
            case events.WorkerExited():
                self._exited(event, now)
            case events.HostLost(host, reason):
                for worker in self._exited_members():
                    rank, facts = self.view.ranks[worker], {"host": host}
                    death = Death(worker, now, Cause.HOST_LOST, rank, what=reason, facts=facts)
                    self._lost(death, now)
                    self._failed_after(death)
            case events.HostReported():
                fenced = {each.worker for each in actions if isinstance(each, events.KillWorker)}
                for worker in self._exited_members():
                    if worker not in fenced:
                        rank = self.view.ranks[worker]
                        self._lost(Death(worker, now, Cause.SIGNAL, rank, trace=""), now)
            case events.StopRequested(reason):
                self.stop = reason
            case events.DriverRestarted():
                self.drivers += 1
            case _:
                pass

    def _exited_members(self) -> list[Worker]:
        return [worker for worker in self.view.exited if worker in self.view.ranks]

    def _rank(self, worker: Worker) -> int | None:
        known = self.view.get(worker)
        return None if known is None else known.rank

    def _is_recorded(self, worker: Worker) -> bool:
        return worker.incarnation <= self._recorded.get((worker.host, worker.slot), 0)

    def _connected(self, worker: Worker) -> bool:
        known = self.view.get(worker)
        return known is not None and known.connected_at is not None

    def _exited(self, event: events.WorkerExited, now: float) -> None:
        worker = event.worker
        if self._is_recorded(worker):
            self._complete(event)
            own = [each for each in self.losses() if each.worker == worker]
            if event.code and own:
                self._failed_after(own[-1])
                self.after_raised |= self.after is not None and self.after.worker == worker
        elif worker not in self._going and worker in self.view.exited:
            connected = self._connected(worker)
            death = of_exit(event, now, self._rank(worker), connected=connected)
            if death is not None:
                self._lost(death, now)
                self._failed_after(death)

    def _complete(self, event: events.WorkerExited) -> None:
        if self._open is None:
            return
        for index, death in enumerate(self._open.deaths):
            if death.worker == event.worker and death.code is None:
                self._open.deaths[index] = replace(death, code=event.code)

    def decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.StartWorker(worker):
                self.hosts.add(worker.host)
            case events.KillWorker(worker, reason):
                death = of_fence(worker, reason, now, self._rank(worker))
                if death is not None:
                    self._lost(death, now)
                else:
                    leaving = self._going.setdefault(worker, reason)
                    overdue = reason.kind is ReasonKind.NOT_LEFT and self.view.end is None
                    if overdue and len(self.overdue) < REQUESTS:
                        self.overdue.append((now, worker, leaving, reason))
            case events.LetGo(worker, reason, fenced):
                if not fenced:
                    self._going[worker] = reason
            case events.RejectWorker(worker):
                self._lost(Death(worker, now, Cause.STATE_MISMATCH, self._rank(worker)), now)
            case events.BreakWorld(_, _, reason):
                incident = self._incident(now)
                incident.broke = incident.broke or reason
            case events.WelcomeWorker(elastic=False):
                # In a fixed-size job, training begins in the first world.
                self._running = True
            case events.PublishWorld():
                self._published(action, now)
            case events.ReportRecovery(total_ms=total_ms):
                if self._open is not None:
                    self._open.recovered_ms, self._open.phases_ms = total_ms, action.phases_ms
                    self._open.copied_bytes, self._open.shards = action.copied_bytes, action.shards
                    if action.from_checkpoint and not self._open.from_checkpoint:
                        self._open.from_checkpoint = True
                        self._resumes_from(self.view.durable)
                    self._open = None
                elif self._trains_since_before(action):
                    self.planned.count += 1
                    self.planned.longest_ms = max(self.planned.longest_ms, total_ms)
            case events.EndJob() if action is self.view.end:
                self.end_at = now
                if self._open is not None:
                    self._open.ended = True
            case events.AnswerRequest(_, done) if len(self.requests) < REQUESTS:
                self.requests.append((now, self._event, done))
            case _:
                pass

    def _trains_since_before(self, action: events.ReportRecovery) -> bool:
        return action.reason.kind not in (
            ReasonKind.ENTERING,
            ReasonKind.FIRST_WORLD,
            ReasonKind.INIT_AGAIN,
        )

    def _published(self, world: events.PublishWorld, now: float) -> None:
        self.largest = max(self.largest, len(world.members))
        if self._running and self.trained_at is None:
            self.trained_at = now
        if self._open is not None:
            self._open.size_after = len(world.members)
            self._open.from_checkpoint = not world.holders and self._open.newest is not None
            self._resumes_from(self.view.durable if self._open.from_checkpoint else world.commit)

    def _resumes_from(self, commit: Commit | None) -> None:
        assert self._open is not None
        self._open.commit, self._open.step = commit, self.view.step_of(commit)
        self._open.uncommitted = self.uncommitted

    def _lost(self, death: Death, now: float) -> None:
        if self.view.end is not None or self._is_recorded(death.worker):
            return
        self._recorded[death.worker.host, death.worker.slot] = death.worker.incarnation
        ranks = self.view.ranks
        if death.worker in ranks:
            death = replace(death, size=len(ranks))
        trace = death.trace[-TRACE:]
        if trace in self._traces or len(self._traces) >= TRACES:
            death = replace(death, trace="")
        elif trace:
            self._traces.add(trace)
        aside = self._open is None and bool(ranks) and death.worker not in ranks
        self._incident(now).deaths.append(death)
        if aside:  # The worker was not a member, so no recovery follows and the incident ends here.
            self._open = None

    def _failed_after(self, death: Death) -> None:
        end, ranks = self.view.end, self.view.ranks
        succeeded = end is not None and end.code == 0 and self.stop is None
        runs = death.worker in ranks and self._connected(death.worker)
        if succeeded and runs and self.after is None:
            self.after = replace(death, size=len(ranks), trace=death.trace[-TRACE:])

    def _incident(self, now: float) -> Incident:
        if self._open is None or self._open.size_after is not None:
            newest = self.view.newest
            step = self.view.step_of(newest)
            self._open = Incident(now, size=len(self.view.ranks), newest=newest, newest_step=step)
            if len(self.incidents) < INCIDENTS:
                self.incidents.append(self._open)
            else:
                self.more_incidents += 1
        return self._open
