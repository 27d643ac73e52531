"""State of a job, derived from its events and decisions: workers and their stages, ranks, world, commits, and outcome.

Pure: no I/O, no clock.

`JobView` is the only class that derives these facts. It receives each event and its actions once. The live page, the
metrics, the time accounting, the stall detection, ``explain``, the report, the timeline and the log are readers of the
view:

    view = JobView()
    page = PageModel(TimeSpent(view), name="bert", command=[], least=2, most=4)    # follows the view
    view.note(event, actions, now)

A reader is called after the view has been updated with an event, and again after each of the resulting actions, so it
can distinguish the changes due to the event from those due to each action. The invariant checker in
``chaos/invariants`` does not use the view, so that it can detect errors in it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.driver import events
from elastic.driver.monitoring.late_islands import LateIslands
from elastic.driver.reasons import Reason, ReasonKind
from elastic.protocol.messages import Commit, Worker

STEPS = 64  # number of latest commits for which step counters are stored
# Reasons for which workers are killed without having failed: they had not called init(), or did not exit when released.
REMOVALS = frozenset(
    {
        ReasonKind.TOLD,  # the worker received SIGTERM
        ReasonKind.HOST_NOT_LISTED,
        ReasonKind.HOST_LEAVES,
        ReasonKind.SCALED_DOWN,
        ReasonKind.DRAINED,
        ReasonKind.QUARANTINED,
        ReasonKind.REMOVED,
        ReasonKind.REPLACED,
        ReasonKind.JOB_ENDED,
        ReasonKind.NOT_LEFT,
    }
)


class Stage(enum.Enum):
    """Stage of a running worker process. The values are labels of a metric."""

    STARTING = "starting"  # the driver ordered the start; the worker has not called init() yet
    # The worker called init(). In an elastic job, members of a world outside elastic.run stay in this stage.
    CONNECTED = "connected"
    READY = "ready"  # the worker waits for a world; it may be a member of the previous world
    STANDBY = "standby"
    # The worker trains in the newest world, or was a member of an earlier world and is about to exit.
    IN_WORLD = "training"
    RETURNED = "returned"  # the worker's training function returned
    LEAVING = "leaving"  # the worker was asked to leave; later reports do not change this stage
    KILLED = "killed"  # the driver ordered the kill of the worker; this stage is final

    __hash__ = object.__hash__  # The default hash of an enum is computed in Python, which is slow.


@dataclass(frozen=True)
class Failure:
    """Failure that a worker reported: an exception in the script, or an imminent exit with an error."""

    raised: bool
    # summary of the exception, or the call that ended the worker; empty if the worker was rejected for its state
    what: str


@dataclass(eq=False, slots=True)
class WorkerView:
    """State of one worker process, from the decision to start it until its exit."""

    worker: Worker
    stage: Stage = Stage.STARTING
    pid: int = 0  # process ID, or 0 if unknown
    connected_at: float | None = None  # time of init(), or None if init() was not observed
    # whether the worker is in `JobView.ranks`; in stage IN_WORLD, True until the worker announces its exit
    member: bool = False
    rank: int | None = None  # rank in the worker's last world, or None if it was in no world
    # whether the worker's world failed and no newer world was published; implies `member`
    recovering: bool = False
    running: bool = False  # whether the worker was in elastic.run when it last reported ready
    # reason why the worker is frozen: empty if unknown, None if it is not frozen
    frozen: str | None = None
    why: Reason | None = None  # reason for the stage LEAVING or KILLED; None in other stages
    # whether the worker is no longer needed although it did not fail, so its exit or kill does not count as a loss
    removed: bool = False
    failure: Failure | None = None
    # exit code; None while the worker runs, and if it was lost with its host
    code: int | None = None


class ViewReader:
    """Base class of the readers of a `JobView`."""

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        """Handle an event. The view already reflects the event, but not the resulting ``actions``."""

    def decided(self, action: events.Action, now: float) -> None:
        """Handle an action. The view already reflects it."""

    def adopted(self, now: float) -> None:
        """Handle the takeover of a running job from a previous driver. The view already contains its workers."""


class JobView:
    """State of one job. Times are in seconds on a clock chosen by the caller."""

    def __init__(self) -> None:
        # Workers that the driver has started and that have not exited, in the order in which they were first mentioned.
        self.workers: dict[Worker, WorkerView] = {}
        self._on_host: dict[str, dict[Worker, None]] = {}  # the workers in `workers`, by host
        # Processes whose exit the current event reported. They were removed from `workers`.
        self.exited: dict[Worker, WorkerView] = {}
        # Running processes that may have changed with the last event or action.
        self.touched: list[WorkerView] = []
        self.started = 0  # number of processes that the driver has started
        # Ranks of the members of the newest world, in rank order. Includes exited members, unless they exited under a
        # previous driver. The mapping is replaced, never modified.
        self.ranks: Mapping[Worker, int] = {}
        self.before: Mapping[Worker, int] = {}  # rank of each member of the previous world
        self.generation = 0  # generation of the newest world, or 0 if there was none
        # the newest world, or None after it has ended
        self.world: events.PublishWorld | None = None
        self.broken = False  # whether the newest world failed
        self.trains = False  # whether a member of the newest world has entered elastic.run
        self.elastic = False  # whether the job is elastic, so its training begins in elastic.run
        self.newest: Commit | None = None  # newest commit that any worker reported
        self.newest_at = 0.0  # time at which `newest` was reported
        self.commits = 0  # number of commits in all generations
        self.mistakes: dict[str, str] = {}  # mistakes found by the script checks, by kind
        self.islands = LateIslands()  # late islands of elastic.DiLoCo
        # Whether this driver took over the job. The previous driver may have received reports of further commits.
        self._adopted = False
        # Step counter of the state at each of the latest reported commits.
        self._steps: dict[Commit, int] = {}
        # for each generation with commits, the number of commits in all earlier generations
        self._earlier: dict[int, int] = {}
        # Commit of the newest checkpoint, which is never newer than `newest`.
        self.durable: Commit | None = None
        self.checkpoints = 0
        # Time of the last checkpoint, or None if there was none.
        self.checkpoint_at: float | None = None
        # Slots that failed their last health check, and the result of that check.
        self.unhealthy: dict[tuple[str, int], events.WorkerHealthChecked] = {}
        # Number of failed health checks and the last failure, by slot.
        self.failed_checks: dict[tuple[str, int], tuple[int, events.WorkerHealthChecked]] = {}
        # Latest successful measurement of each listed host.
        self.bandwidth: dict[str, events.BandwidthMeasured] = {}
        # Quarantined slots, and the reason why their worker was fenced.
        self.quarantined: dict[tuple[str, int], Reason] = {}
        self.end: events.EndJob | None = None  # the first decision that ended the job
        # For each slot, the incarnation of the last exited process. Later reports of this process are ignored.
        self._last: dict[tuple[str, int], int] = {}
        self._of_events: list[Callable[[events.Event, Sequence[events.Action], float], None]] = []
        self._of_actions: list[Callable[[events.Action, float], None]] = []
        self._of_adoption: list[Callable[[float], None]] = []

    def follow(self, reader: ViewReader) -> None:
        """Call ``reader`` for each later event and action, after the existing readers."""
        kind = type(reader)
        if kind.happened is not ViewReader.happened:
            self._of_events.append(reader.happened)
        if kind.decided is not ViewReader.decided:
            self._of_actions.append(reader.decided)
        if kind.adopted is not ViewReader.adopted:
            self._of_adoption.append(reader.adopted)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def note(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        """Record an event and its actions, and call all readers."""
        if self.touched:
            self.touched = []
        if self.exited:
            self.exited = {}
        self._happened(event, now)
        for happened in self._of_events:
            happened(event, actions, now)
        for action in actions:
            self.touched = []
            self._decided(action, now)
            for decided in self._of_actions:
                decided(action, now)

    def adopt(
        self,
        workers: Mapping[Worker, tuple[int, int | None]],
        generation: int,
        now: float,
        *,
        prepares: bool = False,
    ) -> None:
        """Take over a job that is already running.

        Args:
            workers: for each running worker, its process ID (0 if unknown) and its rank (None if it is not a member).
            generation: generation of the current world.
            now: current time, in seconds.
            prepares: whether the job is elastic and its current world is outside elastic.run.
        """
        self.touched = []
        self.elastic, self._adopted = prepares, True
        members = [(rank, worker) for worker, (_, rank) in workers.items() if rank is not None]
        for worker, (pid, _) in workers.items():
            self._add(WorkerView(worker, Stage.CONNECTED, pid, now))
        for _, worker in members:
            self.workers[worker].running = not prepares
        self._publish({worker: rank for rank, worker in sorted(members)}, generation)
        self.touched = [*self.workers.values()]
        for adopted in self._of_adoption:
            adopted(now)

    # ---- queries ---------------------------------------------------------------------------------------------------

    @property
    def prepares(self) -> bool:
        """Whether the newest world of an elastic job is outside elastic.run, so training has not begun."""
        return self.elastic and not self.trains

    @property
    def uncommitted(self) -> bool:
        """Whether the job has made no commit, so that workers have reported only their initial state.

        False if unknown, after a takeover from a previous driver, and if a checkpoint exists.
        """
        newest = self.newest
        unknown = self._adopted or newest is None or self.durable is not None
        return not unknown and not self.commits and not self.step_of(newest)

    @property
    def unsaved(self) -> int:
        """Number of reported commits after the newest checkpoint."""
        if self.durable is None:
            return self.commits
        earlier = self._earlier.get(self.durable.generation, self.commits)
        return max(0, self.commits - earlier - self.durable.number)

    def step_of(self, commit: Commit | None) -> int | None:
        """Return the step counter of the state at a commit, or None if unknown.

        The counters of only the latest STEPS commits are stored.
        """
        return None if commit is None else self._steps.get(commit)

    def get(self, worker: Worker) -> WorkerView | None:
        """Return the state of a worker that is running or whose exit the current event reported, otherwise None."""
        return self.workers.get(worker) or self.exited.get(worker)

    # ---- private ---------------------------------------------------------------------------------------------------

    def _happened(self, event: events.Event, now: float) -> None:
        match event:
            # the cases are ordered by frequency, most frequent first
            case events.WorkerResumed() | events.WorkersResumed():
                pass
            case events.WorkersReady(workers, running=running):
                for worker in workers:
                    known = self.workers.get(worker) or self._known(worker)
                    if known is None:
                        continue
                    known.running = running
                    if known.stage is Stage.IN_WORLD:  # the usual case
                        known.stage = Stage.READY
                        self.touched.append(known)
                    else:
                        self._move(known, Stage.READY)
                self._knows(event.commit, now)
                self._counts(event.commit, event.step)
            case events.WorkerSpent(worker):
                self._known(worker)
                self._knows(event.commit, now)
                self._counts(event.commit, event.step)
            case events.WorkerFoundMistake(_, kind, text):
                self.mistakes[kind] = text
            case events.WorkerMerged():
                self.islands.receive(event, now)
            case events.WorkerPaced() | events.WorkerDigested():
                self._knows(event.commit, now)
            case events.WorkerReady(worker, running=running):
                known = self._known(worker)
                if known is not None:
                    known.running = running
                    self._move(known, Stage.READY)
                self._knows(event.commit, now)
                self._counts(event.commit, event.step)
            case events.WorkerConnected(worker, pid):
                known = self._known(worker)
                if known is not None:
                    known.pid, known.connected_at = pid, now
                    self._move(known, Stage.CONNECTED)
            case events.WorkerReturned(worker) if worker in self.workers:
                self._move(self.workers[worker], Stage.RETURNED)
            case events.WorkerRaised(worker, summary=summary):
                self._fails(worker, Failure(True, summary))
                self._knows(event.commit, now)
            case events.WorkerQuit(worker, call=call) if event.code:
                self._fails(worker, Failure(False, call))
            case events.WorkerFrozen(worker, how) if worker in self.workers:
                self._freeze(self.workers[worker], how)
            case events.WorkerThawed(worker) if worker in self.workers:
                self._freeze(self.workers[worker], None)
            case events.WorkerExited(worker, code):
                self._exits([worker], code)
            case events.HostLost(host):
                self._exits([*self._on_host.get(host, ())], None)
            case events.HostReported(host, alive, ordered) if ordered is not None:
                ours = [each for each in ordered if each in self.workers]
                gone = [each for each in ours if each.host == host and each not in alive]
                self._exits(gone, None)
            case events.WorkerHealthChecked() if event.worker in self.workers:
                self._checks(event)
            case events.BandwidthMeasured(host, trouble=""):
                self.bandwidth[host] = event
            case events.HostsChanged(hosts):
                self.bandwidth = {h: e for h, e in self.bandwidth.items() if h in hosts}
                self.unhealthy = {s: e for s, e in self.unhealthy.items() if s[0] in hosts}
                self.quarantined = {s: e for s, e in self.quarantined.items() if s[0] in hosts}
            case events.DrainRequested(_, host, True):
                self.quarantined = {s: e for s, e in self.quarantined.items() if s[0] != host}
            case events.CheckpointMade(commit):
                self._knows(commit, now)
                self._counts(commit, event.step)
                self.durable = max(self.durable or commit, commit)
                self.checkpoints += 1
                self.checkpoint_at = now
            case _:
                pass

    def _decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.StartWorker(worker):
                self.started += 1
                self.touched.append(self._add(WorkerView(worker)))
            case events.PublishWorld(generation, members):
                self._publish({each.worker: rank for rank, each in enumerate(members)}, generation)
                self.world = action
                if self.newest is None:
                    # The commit was reported only to a previous driver.
                    self._knows(action.commit, now)
            case events.BreakWorld(_, members):
                self.world, self.broken = None, True
                for worker in members:
                    known = self.workers.get(worker)
                    if known is not None and known.member:
                        known.recovering = True
                        self.touched.append(known)
            case events.FinishWorld():
                self.world = None
            case events.WelcomeWorker(worker, elastic=elastic):
                self.elastic = elastic
                # The worker was admitted, so a previous failure, such as low bandwidth, no longer applies.
                self.unhealthy.pop((worker.host, worker.slot), None)
            case events.TellStandby(worker) if worker in self.workers:
                self._move(self.workers[worker], Stage.STANDBY)
            case events.LetGo(worker, reason) if worker in self.workers:
                leaving = self.workers[worker]
                leaving.removed |= leaving.stage is not Stage.KILLED
                self._move(leaving, Stage.LEAVING, reason)
            case events.KillWorker(worker, reason) if worker in self.workers:
                killed = self.workers[worker]
                killed.removed |= killed.stage is not Stage.KILLED and reason.kind in REMOVALS
                self._move(killed, Stage.KILLED, reason)
                if reason.facts.get("outcome") == events.HealthOutcome.LOW_BANDWIDTH.value:
                    line = str(reason.facts["line"])
                    low = events.HealthOutcome.LOW_BANDWIDTH
                    self._checks(events.WorkerHealthChecked(worker, low, None, line))
                if reason.facts.get("quarantine", "off") != "off":
                    self.quarantined[worker.host, worker.slot] = reason
            case events.EndJob():
                self.end = self.end or action
            case _:
                pass

    def _checks(self, event: events.WorkerHealthChecked) -> None:
        slot = event.worker.host, event.worker.slot
        if event.outcome is events.HealthOutcome.PASSED:
            before = self.unhealthy.get(slot)
            # A passed health check does not clear low bandwidth, because the bandwidth is measured after it.
            if before is not None and before.outcome is not events.HealthOutcome.LOW_BANDWIDTH:
                del self.unhealthy[slot]
            self.quarantined.pop(slot, None)
        # agents may repeat a result, which is counted only once
        elif self.unhealthy.get(slot) != event:
            self.unhealthy[slot] = event
            self.failed_checks[slot] = (self.failed_checks.get(slot, (0, event))[0] + 1, event)

    def _known(self, worker: Worker) -> WorkerView | None:
        known = self.workers.get(worker)
        if known is None and worker.incarnation > self._last.get((worker.host, worker.slot), 0):
            known = self._add(WorkerView(worker, Stage.CONNECTED))
            self.touched.append(known)
        return known

    def _add(self, process: WorkerView) -> WorkerView:
        worker = process.worker
        self.workers[worker] = process
        self._on_host.setdefault(worker.host, {})[worker] = None
        return process

    def _move(self, known: WorkerView, stage: Stage, why: Reason | None = None) -> None:
        self.touched.append(known)
        if known.stage is Stage.KILLED:
            return
        if known.stage is Stage.LEAVING and stage in (Stage.CONNECTED, Stage.READY):
            return
        known.stage, known.why = stage, why

    def _fails(self, worker: Worker, failure: Failure) -> None:
        known = self.workers.get(worker)
        if known is not None:
            known.failure = failure
            self.touched.append(known)

    def _freeze(self, known: WorkerView, how: str | None) -> None:
        known.frozen = how
        self.touched.append(known)

    def _exits(self, workers: Iterable[Worker], code: int | None) -> None:
        for worker in workers:
            slot = worker.host, worker.slot
            known = self.workers.pop(worker, None)
            self._on_host.get(worker.host, {}).pop(worker, None)
            if known is None:
                if worker.incarnation <= self._last.get(slot, 0):
                    continue
                known = WorkerView(worker)
            self.exited[worker] = known
            known.code = code
            self._last[slot] = max(worker.incarnation, self._last.get(slot, 0))

    def _publish(self, ranks: Mapping[Worker, int], generation: int) -> None:
        self.before, self.ranks = self.ranks, ranks
        self.generation, self.broken = generation, False
        for worker in self.before:
            if worker not in ranks and (known := self.workers.get(worker)) is not None:
                known.member = known.recovering = False
                self.touched.append(known)
        members: list[WorkerView] = []
        for worker, rank in ranks.items():
            known = self.workers.get(worker)
            if known is None:
                known = self._add(WorkerView(worker))
            known.member, known.rank, known.recovering = True, rank, False
            members.append(known)
        self.trains = any(known.running for known in members)
        stage = Stage.CONNECTED if self.prepares else Stage.IN_WORLD
        for known in members:
            if known.stage is Stage.READY:  # the usual case
                known.stage = stage
                self.touched.append(known)
            else:
                self._move(known, stage)

    def _counts(self, commit: Commit | None, step: int | None) -> None:
        if commit is not None and step is not None:
            self._steps[commit] = step
            while len(self._steps) > STEPS:
                del self._steps[next(iter(self._steps))]

    def _knows(self, commit: Commit | None, now: float) -> None:
        known = self.newest
        if commit is None or (known is not None and commit <= known):
            return
        same = known is not None and known.generation == commit.generation
        if not same:
            self._earlier[commit.generation] = self.commits
        self.commits += commit.number - (known.number if known is not None and same else 0)
        self.newest, self.newest_at = commit, now
