"""Record the state of each worker from events, and reject impossible events.

Pure: no I/O, no clock. See `invariants`.
"""

from __future__ import annotations

from math import inf

from elastic.chaos.invariants.observed_job import LiveWorker, ObservedJob
from elastic.driver import events
from elastic.protocol.messages import Commit, Worker

# assumed number of seconds until the end of a machine whose preemption notice states no time
UNKNOWN_S = 600.0


class WorkerRecords:
    """Checker of the events of one journal, in order."""

    def __init__(self, job: ObservedJob) -> None:
        self.job = job

    # ---- starts and exits ------------------------------------------------------------------------------------------

    def observe(self, event: events.Event) -> None:
        match event:
            case events.HostsChanged(hosts):
                self.job.hosts = hosts
                self.job.quarantined = {s for s in self.job.quarantined if s[0] in hosts}
                for host in self.job.going_hosts.keys() - hosts.keys():
                    self._goes(host, None)
            case events.HostLeaving(host, notice):
                self._goes(host, notice)
            case events.HostStaying(host):
                self._goes(host, None)
            case events.HostLost(host) if not self._all_members_are_on(host):
                for worker, known in self._on(host):
                    self.job.goes(worker, known, "was lost with its host")
                    known.dismissed = True
                    self.job.waits.end(("exit", worker), ("init", worker))
            case events.HostReported(host, running, ordered, notice):
                self._goes(host, notice)
                here = set(running)
                for worker, _ in self._on(host):
                    if worker not in here and (ordered is None or worker in ordered):
                        self._gone(worker)
            case events.DriverRestarted():
                self._restarted()
            case events.CheckpointMade(commit):
                newer = self.job.durable is None or commit > self.job.durable
                if newer and self.job.base is None and commit.generation < self.job.generation:
                    self.job.samples.restored(commit)
                self.job.durable = max(self.job.durable or commit, commit)
            case events.ReplicasSpoilt(generation) if generation == self.job.generation:
                for worker, known in self.job.here():
                    if not known.finished:
                        self.job.goes(worker, known, "holds a corrupted commit")
                        known.dismissed = True
            case events.WorkersReady() | events.WorkersResumed():
                for each in event.each():
                    self.observe(each)
            case events.WorkerExited(worker, code):
                self._was_started(worker)
                gone = self.job.workers.get(worker)
                if code == 0 and gone is not None and not gone.going:
                    self.job.ended_well[worker.host, worker.slot] = gone
                self._gone(worker)
            case _:
                speaker: Worker | None = getattr(event, "worker", None)
                if speaker is None:
                    return
                self._was_started(speaker)
                if speaker in self.job.workers:
                    self._note_event_of(speaker, self.job.workers[speaker], event)
                else:
                    self._is_late_event(speaker, event)

    def _goes(self, host: str, notice: events.Notice | None) -> None:
        """Record a preemption notice.

        If a host receives several notices, the earliest deadline applies. ``notice`` is None if the notice was
        withdrawn or the machine was replaced.
        """
        for _, known in self._on(host):
            known.noticed = notice is not None
        if notice is None:
            self.job.going_hosts.pop(host, None)
            return
        within_s = UNKNOWN_S if notice.within_s is None else notice.within_s
        ends = self.job.going_hosts.get(host, inf)
        self.job.going_hosts[host] = min(ends, self.job.now + within_s)

    def _was_started(self, worker: Worker) -> None:
        last = self.job.incarnations.get((worker.host, worker.slot), 0)
        what = f"{worker} has events, but was never started"
        self.job.must(1 <= worker.incarnation <= last, "ONE PER SLOT", what)

    def _on(self, host: str) -> list[tuple[Worker, LiveWorker]]:
        return [(w, known) for w, known in self.job.workers.items() if w.host == host]

    def _all_members_are_on(self, host: str) -> bool:
        here = [(w, k) for w, k in self.job.here() if not (k.dismissed or k.finished)]
        return bool(here) and all(w.host == host or k.going for w, k in here)

    def _gone(self, worker: Worker) -> None:
        known = self.job.workers.pop(worker, None)
        if known is not None:
            self.job.departed[worker.host, worker.slot] = (worker, known)
        if self.job.slots.get((worker.host, worker.slot)) == worker:
            del self.job.slots[worker.host, worker.slot]
        self.job.waits.end(("exit", worker), ("init", worker), ("link", worker))

    def _restarted(self) -> None:
        self.job.waits.end_all()
        for worker, known in self.job.workers.items():
            if known.connected and not known.going:
                by = self.job.now + self.job.settings.reconnect_s
                self.job.waits.begin(("link", worker), by, f"expected {worker} to connect again")
        if self.job.broken_at is not None:
            self.job.broken_at = self.job.now
            self.job.gathers()

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _is_late_event(self, worker: Worker, event: events.Event) -> None:
        """Check an event of a worker that has already exited. Its reports of commits are still valid."""
        departed, known = self.job.departed.get((worker.host, worker.slot), (None, None))
        if departed != worker or known is None:
            return
        match event:
            case events.WorkerReconnected() | events.WorkerDisconnected():
                self._is_overtaken(known, event)
            case events.WorkerDigested():
                self._speaks_of(worker, known, event.generation)
                self._counts_on(worker, known, event)

    def _note_event_of(self, worker: Worker, known: LiveWorker, event: events.Event) -> None:
        if isinstance(event, events.WorkerReady) and 0 < event.number < known.readies:
            return  # outdated: a newer Ready message of this worker was already processed
        generation: int | None = getattr(event, "generation", None)
        if isinstance(event, events.WorkerReconnected) and not known.reconnected:
            known.reported_at_first = known.reported
        if generation is not None:
            self._speaks_of(worker, known, generation)
        match event:
            case events.WorkerLocated():
                known.silent = False
            case events.WorkerHealthChecked() if known.healthy is None:
                known.healthy = event.outcome is events.HealthOutcome.PASSED
            case events.WorkerConnected():
                known.connected = True
                self.job.waits.end(("init", worker))
            case events.WorkerReconnected():
                known.connected = True
                self._is_overtaken(known, event)
                self.job.waits.end(("init", worker))
                self.job.waits.end(("link", worker))
            case events.WorkerReady():
                self._ready(worker, known, event)
            case events.WorkerResumed():
                self._resumed(worker, known, event)
            case events.WorkerDigested():
                self._digested(worker, known, event)
            case events.WorkerChecked(_, generation, _, check) if generation == self.job.generation:
                self.job.checks[worker] = check
            case events.WorkerStranded():
                known.stranded = True
            case events.WorkerLeaving():
                known.asked_to_leave = True
            case events.WorkerRaised():
                self.job.goes(
                    worker, known, "raised an exception", exit_within=self.job.settings.leave_s
                )
                known.dismissed = True
            case events.WorkerQuit(_, generation) if (
                generation == self.job.generation and not known.going
            ):
                # There is no time limit without other members.
                if any(w != worker and not (k.dismissed or k.finished) for w, k in self.job.here()):
                    self.job.goes(worker, known, "has quit", exit_within=self.job.settings.leave_s)
                    known.dismissed = True
            case events.WorkerReturned(_, generation) if generation == self.job.generation:
                if self.job.broken_at is None:
                    known.returned = generation
                if self.job.broken_at is None and not known.going:
                    by = self.job.now + self.job.settings.elastic_timeout_s
                    what = (
                        f"expected the end of generation {generation}, from which {worker} returned"
                    )
                    self.job.waits.begin_unless_open("end", by, what)
            case events.WorkerDisconnected():
                self._is_overtaken(known, event)
                if known.going:
                    return
                by = self.job.now + self.job.settings.disconnect_s
                what = f"expected {worker}, which lost its connection, to exit or be fenced"
                self.job.waits.begin_unless_open(("link", worker), by, what)

    @staticmethod
    def _is_overtaken(
        known: LiveWorker, event: events.WorkerReconnected | events.WorkerDisconnected
    ) -> None:
        generation = known.placed
        if isinstance(event, events.WorkerReconnected):
            known.reconnected = True
            generation = event.generation
        known.overtaken_in = max(known.overtaken_in, generation)

    def _speaks_of(self, worker: Worker, known: LiveWorker, generation: int) -> None:
        places = sorted({known.before, known.placed})
        # Messages of one connection arrive in order. Only a message from a lost connection, or from before the worker's
        # first world, may be late.
        was_there = known.first <= generation or not (generation or known.reported_at_first)
        late = known.reconnected and was_there and generation < known.placed
        if generation not in places and not late:
            what = f"{worker} reports generation {generation}, expected one of {places}, its own"
            self.job.broken("NO MIXING", what)
        if generation < known.reported and not known.reconnected:
            what = f"{worker} reports generation {generation} after {known.reported}"
            self.job.broken("NO MIXING", what)
        known.reported = max(generation, known.reported)

    def _ready(self, worker: Worker, known: LiveWorker, event: events.WorkerReady) -> None:
        known.readies = event.number
        if known.going or (worker in self.job.members and event.generation != self.job.generation):
            # sent before the worker received its new world, or by a worker that must not rejoin
            return
        if event.commit is not None and known.holds is not None and event.commit < known.holds:
            what = f"{worker} is ready with commit {event.commit}, expected at least {known.holds}"
            self.job.broken("NEVER BACK", what)
        if self.job.stop_at is not None and worker in self.job.members and event.running:
            agreed = Commit(self.job.generation, self.job.stop_at)
            early = event.own_pace and event.commit is not None and event.commit < agreed
            if not early:
                self._stopped(worker, known, event.commit, agreed)
        self._not_from_outside(worker, known, event.commit)
        known.commit = known.holds = event.commit
        known.metadata = event.metadata
        known.kept = [each.commit for each in event.kept.commits]
        known.running, known.ready, known.own_pace = event.running, True, event.own_pace
        if self.job.first_ready_at is None:
            self.job.first_ready_at = self.job.now
            for each, other in self.job.workers.items():
                self.job.awaits_init(each, other)

    def _stopped(
        self, worker: Worker, known: LiveWorker, commit: Commit | None, agreed: Commit
    ) -> None:
        if known.reconnected and commit != agreed:
            # a collective failed on this worker, and its report of the failure was lost
            self.job.stop_at = None
        elif commit is not None and commit != agreed:
            what = f"{worker} has stopped with commit {commit}, expected {agreed}, like all others"
            self.job.broken("NEVER BACK", what)

    def _resumed(self, worker: Worker, known: LiveWorker, event: events.WorkerResumed) -> None:
        if known.resumed == event.generation and not known.reconnected:
            self.job.broken("NO MIXING", f"{worker} resumed twice in generation {event.generation}")
        known.resumed = event.generation
        self.job.trained = self.job.trained or event.generation == self.job.generation
        if event.generation == known.placed and not known.ready:
            self._has(known, Commit(event.generation, 0))

    def _has(self, known: LiveWorker, commit: Commit) -> None:
        known.holds = commit if known.holds is None else max(known.holds, commit)

    def _counts_on(self, worker: Worker, known: LiveWorker, event: events.WorkerDigested) -> None:
        """Check that the commits of one worker in one generation are in ascending order.

        Consecutive reports may name the same commit, because a commit may be reported in several parts.
        """
        generation, commit = event.generation, event.commit
        if commit.generation > generation:
            what = f"{worker} reports commit {commit} while in generation {generation}"
            self.job.broken("NO MIXING", what)
        late = known.reconnected and known.first <= commit.generation < known.placed
        if not commit.generation or not (commit.generation in (known.before, known.placed) or late):
            what = f"{worker} reports commit {commit}, and was in no world of generation"
            self.job.broken("NO MIXING", f"{what} {commit.generation}")
        last = known.digested
        if last is None or last < (generation, commit):
            known.digested = (generation, commit)
        elif last[0] == generation and commit < last[1] and generation > known.overtaken_in:
            what = f"{worker} reports commit {commit} after {last[1]}"
            self.job.broken("NEVER BACK", what)

    def _digested(self, worker: Worker, known: LiveWorker, event: events.WorkerDigested) -> None:
        commit = event.commit
        self._counts_on(worker, known, event)
        self._not_from_outside(worker, known, commit)
        if event.digest:
            digest, first = self.job.digests.setdefault(commit, (event.digest, str(worker)))
            self.job.compared += first != str(worker)
            if digest != event.digest:
                what = (
                    f"{worker} has {event.digest:x} under commit {commit}, {first} has {digest:x}"
                )
                self.job.broken("EQUAL DIGESTS", what)
        if event.generation == known.placed and not known.ready and not known.going:
            self._has(known, commit)
        wrong = self.job.samples.reported(worker, commit, event.epoch, event.samples)
        if wrong:
            self.job.broken("EACH SAMPLE ONCE", wrong)

    def _not_from_outside(self, worker: Worker, known: LiveWorker, commit: Commit | None) -> None:
        if commit is None or worker in self.job.members or known.going or known.stranded:
            return
        newer = self.job.base is None or commit > self.job.base
        if commit.generation < self.job.generation and newer:
            began = f"generation {self.job.generation} began from {self.job.base}"
            what = f"{worker}, in no world since {known.placed}, has commit {commit}, and {began}"
            self.job.broken("NO OLDER COMMIT", what)
