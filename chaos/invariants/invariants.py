"""Invariants of every job, checked on the driver's events and on the resulting actions.

Pure: no I/O, no clock.

The checks do not use the code of membership that makes the decisions. They receive events and actions from a journal
or a running simulation, and raise BrokenInvariant at the first violation. Their state is small, and the work per event
is proportional to the number of resulting actions.

"Not visible" marks what the events and actions cannot show.

    ONE GENERATION     Worlds are numbered without a gap. Each worker that trained in one world is in the next world,
                       unless it was released, fenced or lost before. Orders about a world go to its live members and
                       carry its generation. Not visible: whether a process obeyed before it answered.
    NO OLDER COMMIT    A worker outside the current world reports no commit that is newer than the one from which this
                       world began, unless it is fenced or leaving. Not visible: unreported commits.
    NEVER BACK         A world begins from the newest commit that its old members reported, and rank 0 holds this
                       commit. No remaining worker reports an older commit than it held before. Unless its connection
                       was replaced, it reports the commits of one world in ascending order. After a planned change,
                       all old members hold the same commit. Not visible: commits of a worker that was killed before
                       it reported them.
    LATEST METADATA    A world contains the metadata of each member's last Ready message, by rank, or no metadata.
    EQUAL DIGESTS      Commits with the same generation and number have equal parameters. Commit 0 of a world is the
                       commit from which the world began.
    EACH SAMPLE ONCE   Checked only if workers report samples, which they do in tests. See `sample_history`.
    SIZE               min <= members <= max, or max + 1 while a worker leaves. The reason for a slow gathering is
                       logged. No world of elastic.run has a free place while a worker waits for one. At most max
                       workers plus the standbys are started.
    NO MIXING          A worker reports only on generations in which it has a place, in ascending order, and resumes
                       once in each. Not visible: which bytes a collective moved.
    RANK 0 IS NO OTHER Ranks start at 0: first the old members that hold the commit, then other old members, then new
                       members. Old members keep their order. The job does not end because of a missing holder while a
                       holder is alive.
    EVERY WAIT ENDS    Starts, exits, answers, stops, gatherings and the end of the job happen within their timeouts.
                       Not visible: waits that a worker does not report.
    SEALED IS KEPT     If a worker has reported a commit of a sharded state as sealed, no older commit is restored as
                       long as members hold all shards of the sealed commit, or workers on at most `copies` hosts are
                       missing. Not visible: seals that no worker reported before it was lost.
    SEALED IS MIRRORED Each member of the world that sealed a commit holds its own shard and its copies of other shards.
    EVERY SHARD HELD   Members hold every shard of the commit that a world restores. In the new world, each shard is
                       trained by a member and kept on 1 + `copies` hosts, or on all hosts if there are fewer.
    ONE COMMIT RESTORED All members of a world restore the same commit of a sharded state.
    ONE PER SLOT       No worker is started in a slot before the exit of the slot's last worker was observed.
                       Incarnation numbers increase. Only started workers report.
    NOTICES            No worker is started on a machine with a preemption notice before the announced end.
    UNHEALTHY STAYS OUT In a job with a health check, a worker is in a world only after the check of its slot
                       has passed, and not after a check has failed.
    SLOW STAYS OUT     One host is measured at a time, and a worker is rejected for low bandwidth only if its host was
                       measured, and was below the given share of the median of at least two others.
    QUARANTINED STAYS EMPTY A worker is fenced for wrong gradients only if a member has reported it. No worker is
                       started in its slot or on its host until an operator releases it or a health check passes.
    FENCED STAYS OUT   A worker that was killed, released, rejected or lost with its host, or that finished, is in no
                       later world.
    THE END            EndJob occurs once. Afterwards no worker is started and no world is published. The driver never
                       raises an exception. The code and reason of EndJob match the observed returns and exits. See
                       `job_end`.
    TIME               Time never goes backwards, not even when another driver continues the job.
    ONE DRIVER         Each driver that continues the job has a greater term than its predecessor, and first records
                       that it was restarted. Not visible: actions of a replaced driver, since it cannot write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic.chaos.invariants.job_end import JobEnd
from elastic.chaos.invariants.observed_job import BrokenInvariant, LiveWorker, ObservedJob
from elastic.chaos.invariants.shard_records import ShardRecords
from elastic.chaos.invariants.worker_records import WorkerRecords
from elastic.chaos.invariants.world_sequence import WorldSequence
from elastic.driver.events import (
    Action,
    AnswerRequest,
    BandwidthMeasured,
    BreakWorld,
    CallOffChange,
    DrainRequested,
    DriverRestarted,
    DumpStacks,
    EndJob,
    Event,
    FinishWorld,
    HealthOutcome,
    HostReported,
    KillWorker,
    LetGo,
    MeasureBandwidth,
    PrepareChange,
    ProbeWorkers,
    PublishWorld,
    RejectWorker,
    RemoveRequested,
    Report,
    ScaleRequested,
    StartWorker,
    StopMembersAt,
    TellWorld,
    WorkerMiscomputed,
    WorkerReconnected,
)
from elastic.driver.journal.entries import Writer, describe
from elastic.driver.journal.journal import recording
from elastic.driver.membership.bandwidth import OTHERS_MIN, RESULT_S
from elastic.driver.reasons import Reason, ReasonKind
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Commit, Worker

__all__ = ["BrokenInvariant", "Invariants", "Summary", "check_journal"]

EXPLAIN_S = 12.0  # seconds after which the reason for a slow gathering must have been logged
AFTER_THE_END = (AnswerRequest, LetGo, KillWorker, DumpStacks, Report)
# events after which the driver may repeat its current decisions
REPEATS = (WorkerReconnected, HostReported, DriverRestarted)


@dataclass(frozen=True)
class Summary:
    """Numbers of checked worlds, recoveries, commits and samples. A number of 0 means that nothing was checked."""

    worlds: int
    recoveries: int
    commits_compared: int
    samples_counted: int
    shards_restored: int = 0  # number of worlds that restored a commit of a sharded state


class Invariants:
    """Checker of the invariants of one job.

    Args:
        samples: size of the dataset, if the job is known to train whole epochs. 0 means unknown.
    """

    def __init__(self, settings: Settings, *, samples: int = 0) -> None:
        self.job = ObservedJob(settings, samples)
        self._workers = WorkerRecords(self.job)
        self._sequence = WorldSequence(self.job)
        self._shards = ShardRecords(self.job)
        self._job_end = JobEnd(self.job)
        self._explained = False
        self._recoveries = 0
        self._term = 0  # term of the current driver
        # line at which another driver resumed the journal; 0 after the driver's first event
        self._resumed_at = 0

    @property
    def summary(self) -> Summary:
        return Summary(
            self._sequence.worlds,
            self._recoveries,
            self.job.compared,
            self.job.samples.counted,
            self._shards.restored,
        )

    def begun(self, writer: Writer) -> None:
        """Record the job's first driver. Without this call, any driver may continue the journal."""
        self._term = writer.term

    def resumed(self, writer: Writer, line: int | None = None) -> None:
        """Record that another driver continues the journal.

        Raises:
            BrokenInvariant: the term of ``writer`` is not greater than that of the previous driver.
        """
        self.job.line, self.job.event = line or self.job.line + 1, None
        what = f"a driver of term {writer.term} follows one of term {self._term}"
        self.job.must(writer.term > self._term, "ONE DRIVER", what)
        self._term, self._resumed_at = writer.term, self.job.line

    def saw(
        self,
        at: float,
        event: Event,
        actions: Iterable[Action],
        line: int | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Check one entry of the journal. Raise BrokenInvariant if the entry violates an invariant.

        Args:
            at: time of the event, in seconds.
            event: event that the driver received.
            actions: the driver's reaction to the event.
            line: number of the line in the journal, for error messages.
            more: whether another event is queued, in which case the driver has not checked its deadlines yet. See
                `Membership.handle`.
        """
        self.job.line = line or self.job.line + 1
        before, self.job.now, self.job.event = self.job.now, at, event
        if at < before:
            self.job.broken("TIME", f"the previous line has time {before:.3f}")
        if self._resumed_at:
            what = f"the driver that resumes from line {self._resumed_at} does not record it first"
            self.job.must(isinstance(event, DriverRestarted), "ONE DRIVER", what)
            self._resumed_at = 0
        self.job.repeating = isinstance(event, REPEATS)
        answer = list(actions)
        if self.job.end is not None:
            self._nothing_after_the_end(answer)
            return
        if isinstance(event, BandwidthMeasured) and self.job.measuring == (event.host, event.peer):
            self.job.bandwidth[event.host], self.job.measuring = event, None
        self._workers.observe(event)
        self._shards.observe(event)
        let_go = {a.worker for a in answer if isinstance(a, LetGo | RejectWorker)}
        self._job_end.finishes = any(isinstance(action, FinishWorld) for action in answer)
        for action in answer:
            self._did(action, let_go)
        if self.job.end is None and not more:
            self._no_wait_exceeds_deadline()

    def raised(self, error: str) -> None:
        """Report that the driver raised an exception while it handled the last event. Raises BrokenInvariant."""
        self.job.broken(
            "THE END", f"the driver raised {error}, expected it to continue or to end the job"
        )

    def finish(self, *, ended: bool = True) -> None:
        """Check the end of the journal.

        Raise BrokenInvariant if the job did not end or did not train every sample once.

        Args:
            ended: whether the job must have ended. If so, a missing end is a violation.
        """
        self.job.event = None
        if ended and self.job.end is None:
            self.job.broken("EVERY WAIT ENDS", "the job did not end; expected EndJob")
        complete = self.job.end is not None and self.job.end.code == 0
        wrong = self.job.samples.finish(complete=complete)
        if wrong:
            self.job.broken("EACH SAMPLE ONCE", wrong)

    # ---- actions ---------------------------------------------------------------------------------------------------

    def _did(self, action: Action, let_go: set[Worker]) -> None:
        if self.job.end is not None:
            self.job.broken("THE END", f"{describe(action)} follows EndJob")
        match action:
            case StartWorker(worker):
                self._starts(worker)
            case KillWorker(worker, reason):
                if reason.facts.get("outcome") == HealthOutcome.LOW_BANDWIDTH.value:
                    self._is_slow(worker, reason)
                if reason.kind is ReasonKind.MISCOMPUTED:
                    self._quarantines(worker, str(reason.facts.get("quarantine", "off")))
                self.job.waits.end(("init", worker))
                self._leaves(worker, "was killed", self._dies_within_s(worker))
            case LetGo(worker) | RejectWorker(worker):
                self._leaves(worker, "was asked to leave", self.job.settings.leave_s)
                if worker in self.job.workers:
                    self.job.workers[worker].dismissed = True
            case PublishWorld():
                self._sequence.publishes(action, let_go)
                self._shards.published(action)
            case TellWorld():
                pass
            case MeasureBandwidth(host, peer):
                what = f"{host} is measured while the bandwidth of {self.job.measuring} is measured"
                late = self.job.now >= self.job.measuring_since + RESULT_S
                self.job.must(self.job.measuring is None or late, "SLOW STAYS OUT", what)
                self.job.measuring, self.job.measuring_since = (host, peer), self.job.now
            case ProbeWorkers(workers):
                for each in filter(self.job.workers.__contains__, workers):
                    self.job.workers[each].silent = True
            case AnswerRequest(done=True):
                self._answered()
            case (
                BreakWorld(members=members)
                | PrepareChange(members=members)
                | StopMembersAt(members=members)
                | CallOffChange(members=members)
                | FinishWorld(members=members)
            ) if isinstance(self.job.event, WorkerReconnected) and members == [
                self.job.event.worker
            ]:
                pass  # valid: the driver repeats the message to a worker that has reconnected
            case BreakWorld(generation, members):
                self._concerns(action, generation, members)
                self._recoveries += 1
                self.job.stop_at = None
                if self.job.broken_at is None:
                    self.job.broken_at, self._explained = self.job.now, False
                    self.job.gathers()
                self.job.waits.end("stop", "end")
            case PrepareChange(generation, _, members):
                self._concerns(action, generation, members)
                self.job.checks = {}
                by = self.job.now + self.job.settings.prepare_s
                self.job.waits.begin(
                    "stop", by, "expected the planned change to stop or be called off"
                )
            case StopMembersAt(generation, _, check, members):
                self._concerns(action, generation, members)
                checks = [self.job.checks.get(worker, -1) for worker in members]
                passed = max(checks, default=-1)
                what = f"the members have to stop at safepoint {check}, but one passed safepoint {passed}"
                self.job.must(check > passed, "NEVER BACK", what)
                # Members of other groups report that they do not stop at this safepoint, see `own_pace`.
                self.job.stop_at = max(check, self.job.stop_at or 0)
                by = self.job.now + self.job.settings.elastic_timeout_s
                self.job.waits.begin(
                    "stop", by, f"expected all members to have stopped at safepoint {check}"
                )
            case CallOffChange(generation, _, members):
                self._concerns(action, generation, members)
                self.job.stop_at = None
                self.job.waits.end("stop")
            case FinishWorld(generation, members):
                self._concerns(action, generation, members)
                self._job_end.have_returned(action)
                self.job.waits.end("end")
                for worker in members:
                    self._leaves(worker, "had finished", None)
            case Report(_, _, about):
                self._explained = True
                if about is not None and about.kind is ReasonKind.CANT_BE_KILLED:
                    undead = about.facts["worker"]
                    named = [w for w, k in self.job.workers.items() if k.going and str(w) == undead]
                    self.job.waits.end(*(("exit", worker) for worker in named))
                    for worker in named:
                        self.job.workers[worker].dismissed = True
            case EndJob():
                self._job_end.ends(action)

    def _answered(self) -> None:
        match self.job.event:
            case ScaleRequested(_, workers):
                self.job.shrinks = self.job.shrinks or workers < self.job.workers_max
                self.job.workers_max = workers
            case DrainRequested(_, host, off):
                (self.job.drained.discard if off else self.job.drained.add)(host)
                if off:
                    self.job.quarantined = {s for s in self.job.quarantined if s[0] != host}
                for worker, known in self.job.workers.items():
                    if worker.host == host:
                        known.asked_to_leave = not off
            case RemoveRequested(_, worker):
                self.job.workers[worker].asked_to_leave = True

    def _concerns(self, action: Action, generation: int, members: list[Worker]) -> None:
        name, active = type(action).__name__, self.job.generation
        what = f"{name} refers to generation {generation}, but generation {active} is active"
        self.job.must(generation == self.job.generation, "ONE GENERATION", what)
        event = self.job.event
        for worker in members:
            if isinstance(event, HostReported) and worker.host == event.host:
                # Allow this: if several hosts were lost at once, the driver handles the losses one by one.
                continue
            if worker not in self.job.members or worker not in self.job.workers:
                what = f"{type(action).__name__} is sent to {worker}, which is not a live member of generation"
                self.job.broken("ONE GENERATION", f"{what} {generation}")

    def _leaves(self, worker: Worker, why: str, exit_within: float | None) -> None:
        known = self.job.workers.get(worker)
        if known is not None and not (self.job.repeating and known.going):
            self.job.goes(worker, known, why, exit_within=exit_within)

    def _dies_within_s(self, worker: Worker) -> float:
        known = self.job.workers.get(worker)
        if worker in self.job.members and known is not None and not known.going:
            # The shorter limit applies, because the other members wait for the end of this worker.
            return self.job.settings.kill_s
        return max(self.job.settings.leave_s, self.job.settings.kill_s)

    def _is_slow(self, worker: Worker, reason: Reason) -> None:
        facts = reason.facts
        what = f"{worker} is rejected for low bandwidth, but {facts}"
        known = self.job.bandwidth.get(worker.host)
        rates = () if known is None else (known.sent, known.received)
        rate, median, others = (facts[name] for name in ("bytes_s", "median_bytes_s", "others"))
        assert isinstance(rate, float) and isinstance(median, float) and isinstance(others, int)
        low = rate < self.job.settings.bandwidth_factor * median and others >= OTHERS_MIN
        self.job.must(rate in rates and low, "SLOW STAYS OUT", what)

    def _quarantines(self, worker: Worker, which: str) -> None:
        event, rank = self.job.event, self.job.members.get(worker)
        reported = isinstance(event, WorkerMiscomputed) and event.rank == rank is not None
        # The driver may repeat a kill that has not taken effect.
        again = self.job.repeating or self.job.workers[worker].going
        what = f"{worker} is fenced for wrong gradients, which no member has reported"
        self.job.must(reported or bool(again), "QUARANTINED STAYS EMPTY", what)
        if reported and isinstance(event, WorkerMiscomputed) and not event.complete:
            self._doubts_commits_since(self.job.workers[worker].trained_in)
        if which == "off" or self.job.settings.health_check or not self.job.settings.elastic:
            return
        slots = {(worker.host, worker.slot)}
        if which == "host":
            slots |= {(worker.host, slot) for slot in range(self.job.hosts.get(worker.host, 0))}
        self.job.quarantined |= slots

    def _doubts_commits_since(self, generation: int) -> None:
        after = Commit(generation, 0)
        if self.job.doubted is not None and self.job.doubted[1] == self.job.generation:
            after = min(after, self.job.doubted[0])
        self.job.doubted = after, self.job.generation

    def _starts(self, worker: Worker) -> None:
        slot = (worker.host, worker.slot)
        if self.job.settings.elastic and worker.host in self.job.going_hosts:
            ends = self.job.going_hosts[worker.host]
            what = f"{worker} is started on a machine that has announced its end, at {ends:.3f}"
            self.job.must(self.job.now >= ends, "NOTICES", what)
        what = f"{worker} is started on a host that an operator has drained"
        self.job.must(worker.host not in self.job.drained, "NOTICES", what)
        what = f"{worker} is started in a slot whose worker computed wrong gradients"
        self.job.must(slot not in self.job.quarantined, "QUARANTINED STAYS EMPTY", what)
        living = self.job.slots.get(slot)
        what = f"{worker} is started while {living} was not seen to exit"
        self.job.must(living is None, "ONE PER SLOT", what)
        last = self.job.incarnations.get(slot, 0)
        what = f"{worker} is started after incarnation {last}"
        self.job.must(worker.incarnation > last, "ONE PER SLOT", what)
        self.job.slots[slot], self.job.incarnations[slot] = worker, worker.incarnation
        self.job.workers[worker] = LiveWorker()
        here = [
            k
            for k in self.job.workers.values()
            if not (k.going or k.asked_to_leave or k.finished or k.noticed)
        ]
        settings = self.job.settings
        most = self.job.workers_max + settings.standbys
        what = f"{worker} is started as number {len(here)}, expected at most {most}"
        leaves = any(w.slot >= self.job.hosts.get(w.host, 0) for w in self.job.workers)
        leaves = leaves or self.job.shrinks
        self.job.must(len(here) <= most or leaves, "SIZE", what)
        if self.job.first_ready_at is not None:
            self.job.awaits_init(worker, self.job.workers[worker])

    def _no_wait_exceeds_deadline(self) -> None:
        overdue = self.job.waits.overdue(self.job.now)
        self.job.must(not overdue, "EVERY WAIT ENDS", overdue)
        since = self.job.broken_at
        if since is not None and self.job.now > since + EXPLAIN_S and not self._explained:
            self.job.broken("SIZE", f"no world since {since:.3f}, and no reason was reported")

    def _nothing_after_the_end(self, actions: list[Action]) -> None:
        for action in actions:
            again = self.job.repeating and action == self.job.end
            # The driver repeats FinishWorld to a worker that has reconnected.
            if isinstance(action, FinishWorld):
                known = [self.job.workers.get(worker) for worker in action.members]
                again = all(each is not None and each.finished for each in known)
            what = f"{describe(action)} after EndJob"
            self.job.must(again or isinstance(action, AFTER_THE_END), "THE END", what)


def check_journal(path: Path, *, samples: int = 0, ended: bool = True) -> Summary:
    """Check every line of a journal, and return a summary of what was checked.

    Args:
        path: the journal.
        samples: size of the dataset, or 0 if it is unknown.
        ended: whether the job must have ended. Pass False if the job continues or its driver was killed.

    Raises:
        BrokenInvariant: an entry violates an invariant.
        Invalid: the file is not a journal.
    """
    found = recording(path)
    if found.start is not None:
        raise Invalid(
            f"the journal {str(path)!r} begins in the middle of a job, so only replay is possible: pass the"
            " journal of the job's first driver to check the invariants"
        )
    invariants = Invariants(found.settings, samples=samples)
    invariants.begun(found.header.writer)
    takeovers = deque(found.takeovers)
    for number, entry in found.entries:
        while takeovers and takeovers[0][0] < number:
            line, writer = takeovers.popleft()
            invariants.resumed(writer, line)
        invariants.saw(entry.at, entry.event, entry.actions, number, more=entry.more)
        if entry.error:
            invariants.raised(entry.error)
    invariants.finish(ended=ended)
    return invariants.summary
