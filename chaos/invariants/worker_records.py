"""What a journal's events tell of each worker, and which of them can't be true. Pure. See `invariants`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from elastic.chaos.invariants.deadlines import Waits
from elastic.chaos.invariants.sample_history import SampleHistory
from elastic.driver.events import (
    DriverRestarted,
    Event,
    HostLost,
    HostReported,
    HostsChanged,
    WorkerChecked,
    WorkerConnected,
    WorkerDigested,
    WorkerDisconnected,
    WorkerExited,
    WorkerLeaving,
    WorkerQuit,
    WorkerRaised,
    WorkerReady,
    WorkerReconnected,
    WorkerResumed,
    WorkerReturned,
    WorkerStranded,
)
from elastic.driver.journal.journal import describe
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker


class BrokenInvariant(AssertionError):
    """What does not hold, the line of the journal where that is seen, and what was expected."""


@dataclass(eq=False)
class Known:
    """A live worker, as far as the journal tells."""

    connected: bool = False
    first: int = 0  # the first generation that it was given a place in
    placed: int = 0  # the newest one
    before: int = 0  # the one before that
    said: int = 0  # the newest generation it spoke of
    resumed: int = 0
    readies: int = 0  # the number of its latest Ready
    reconnected: bool = False  # so that it may repeat itself, and its words overtake each other
    overtaken_in: int = 0  # the newest generation in which they may
    digested: tuple[int, Commit] | None = None  # generation and commit of its newest digest
    returned: int = 0  # the generation that its function returned in
    finished: bool = False  # and it was told that all have
    dismissed: bool = False  # it is a member no more, as the driver sees it
    running: bool = False  # inside elastic.run, when it was last ready
    ready: bool = False  # since its last world
    commit: Commit | None = None  # as it said when it was last ready
    holds: Commit | None = None  # at least
    going: str = ""  # why it is in no later world
    stranded: bool = False  # its world broke outside elastic.run
    asked_to_leave: bool = False


class WorkerRecords:
    """The events of one journal, in their order."""

    def __init__(self, settings: Settings, samples: int) -> None:
        self.settings = settings
        self._now = 0.0
        self._line = 1  # the journal's first one has the settings
        self._event: Event | None = None
        self._workers: dict[Worker, Known] = {}
        self._slots: dict[tuple[str, int], Worker] = {}
        self._incarnations: dict[tuple[str, int], int] = {}  # the last one started in each slot
        self._departed: dict[tuple[str, int], tuple[Worker, Known]] = {}  # the last one gone
        self._ended_well: dict[tuple[str, int], Known] = {}  # with exit code 0, and unasked
        self._hosts: dict[str, int] = {}
        self._generation = 0
        self._members: dict[Worker, int] = {}  # of the present world: rank
        self._base: Commit | None = None  # the present world began from it
        self._trained = False
        self._broken_at: float | None = None
        self._first_ready_at: float | None = None
        self._checks: dict[Worker, int] = {}  # answers to the change under way
        self._stop_at: int | None = None  # the check at which all members are to stop
        self._digests: dict[Commit, tuple[int, str]] = {}
        self._compared = 0
        self._samples = SampleHistory(samples)
        self._waits = Waits()

    def _broken(self, invariant: str, what: str) -> NoReturn:
        said = f"at {self._now:.3f}, {describe(self._event)}" if self._event else "the last"
        raise BrokenInvariant(f"{invariant}: {what} (line {self._line}, {said})")

    def _must(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            self._broken(invariant, what)

    # ---- who lives -------------------------------------------------------------------------------------------------

    def _heard(self, event: Event) -> None:
        match event:
            case HostsChanged(hosts):
                self._hosts = hosts
            case HostLost(host) if not self._all_members_are_on(host):
                for worker, known in self._on(host):
                    self._goes(worker, known, "was lost with its host")
                    known.dismissed = True
                    self._waits.end(("exit", worker), ("init", worker))
            case HostReported(host, running, ordered):
                here = set(running)
                for worker, _ in self._on(host):
                    if worker not in here and (ordered is None or worker in ordered):
                        self._gone(worker)
            case DriverRestarted():
                self._restarted()
            case WorkerExited(worker, code):
                self._was_started(worker)
                gone = self._workers.get(worker)
                if code == 0 and gone is not None and not gone.going:
                    self._ended_well[worker.host, worker.slot] = gone
                self._gone(worker)
            case _:
                speaker: Worker | None = getattr(event, "worker", None)
                if speaker is None:
                    return
                self._was_started(speaker)
                if speaker in self._workers:
                    self._heard_from(speaker, self._workers[speaker], event)
                else:
                    self._heard_late(speaker, event)

    def _was_started(self, worker: Worker) -> None:
        last = self._incarnations.get((worker.host, worker.slot), 0)
        what = f"{worker} is heard of, and was never started"
        self._must(1 <= worker.incarnation <= last, "ONE PER SLOT", what)

    def _on(self, host: str) -> list[tuple[Worker, Known]]:
        return [(w, known) for w, known in self._workers.items() if w.host == host]

    def _all_members_are_on(self, host: str) -> bool:
        """Then nobody is left to go on without it: it is awaited."""
        here = [(w, k) for w, k in self._here() if not (k.dismissed or k.finished)]
        return bool(here) and all(w.host == host or k.going for w, k in here)

    def _here(self) -> list[tuple[Worker, Known]]:
        """The members whose processes run."""
        return [(w, self._workers[w]) for w in self._members if w in self._workers]

    def _gone(self, worker: Worker) -> None:
        known = self._workers.pop(worker, None)
        if known is not None:
            self._departed[worker.host, worker.slot] = (worker, known)
        if self._slots.get((worker.host, worker.slot)) == worker:
            del self._slots[worker.host, worker.slot]
        self._waits.end(("exit", worker), ("init", worker), ("link", worker))

    def _goes(
        self, worker: Worker, known: Known, why: str, *, exit_within: float | None = None
    ) -> None:
        """It may be part of no later world."""
        known.going = known.going or why
        self._waits.end(("link", worker))
        if exit_within is not None:
            what = f"expected {worker}, which {why}, to exit"
            self._waits.begin(("exit", worker), self._now + exit_within, what)

    def _restarted(self) -> None:
        """Every wait begins anew."""
        self._waits.end_all()
        for worker, known in self._workers.items():
            if known.connected and not known.going:
                by = self._now + self.settings.reconnect_s
                self._waits.begin(("link", worker), by, f"expected {worker} to connect again")
        if self._broken_at is not None:
            self._broken_at = self._now
            self._gathers()

    def _gathers(self) -> None:
        by = self._now + 2 * self.settings.elastic_timeout_s + self.settings.leave_s
        self._waits.begin("gathering", by, "expected a new world")

    def _awaits_init(self, worker: Worker, known: Known) -> None:
        if not known.connected and not known.going:
            by = self._now + self.settings.start_timeout_s
            self._waits.begin(("init", worker), by, f"expected {worker} to call init()")

    # ---- what one says ---------------------------------------------------------------------------------------------

    def _heard_late(self, worker: Worker, event: Event) -> None:
        """It is gone, and the word of its exit was faster than its last words. What they say of commits counts."""
        departed, known = self._departed.get((worker.host, worker.slot), (None, None))
        if departed != worker or known is None:
            return
        match event:
            case WorkerReconnected() | WorkerDisconnected():
                self._is_overtaken(known, event)
            case WorkerDigested():
                self._speaks_of(worker, known, event.generation)
                self._counts_on(worker, known, event)

    def _heard_from(self, worker: Worker, known: Known, event: Event) -> None:
        if isinstance(event, WorkerReady) and 0 < event.number < known.readies:
            return  # of a wait that is over
        generation: int | None = getattr(event, "generation", None)
        if generation is not None:
            self._speaks_of(worker, known, generation)
        match event:
            case WorkerConnected():
                known.connected = True
                self._waits.end(("init", worker))
            case WorkerReconnected():
                known.connected = True
                self._is_overtaken(known, event)
                self._waits.end(("init", worker))
                self._waits.end(("link", worker))
            case WorkerReady():
                self._ready(worker, known, event)
            case WorkerResumed():
                self._resumed(worker, known, event)
            case WorkerDigested():
                self._digested(worker, known, event)
            case WorkerChecked(_, generation, _, check) if generation == self._generation:
                self._checks[worker] = check
            case WorkerStranded():
                known.stranded = True
            case WorkerLeaving():
                known.asked_to_leave = True
            case WorkerRaised():
                self._goes(worker, known, "raised an exception", exit_within=self.settings.leave_s)
                known.dismissed = True
            case WorkerQuit(_, generation) if generation == self._generation and not known.going:
                # Where nobody else is left it may take its time.
                if any(w != worker and not (k.dismissed or k.finished) for w, k in self._here()):
                    self._goes(worker, known, "has quit", exit_within=self.settings.leave_s)
                    known.dismissed = True
            case WorkerReturned(_, generation) if generation == self._generation:
                if self._broken_at is None:
                    known.returned = generation
                if self._broken_at is None and not known.going:
                    by = self._now + self.settings.elastic_timeout_s
                    what = (
                        f"expected the end of generation {generation}, from which {worker} returned"
                    )
                    self._waits.begin_unless_open("end", by, what)
            case WorkerDisconnected():
                self._is_overtaken(known, event)
                if known.going:
                    return
                by = self._now + self.settings.disconnect_s
                what = f"expected {worker}, which lost its connection, to exit or be fenced"
                self._waits.begin_unless_open(("link", worker), by, what)

    @staticmethod
    def _is_overtaken(known: Known, event: WorkerReconnected | WorkerDisconnected) -> None:
        """What was under way on its lost connection may come after what it says on another."""
        generation = known.placed
        if isinstance(event, WorkerReconnected):
            known.reconnected = True
            generation = event.generation
        known.overtaken_in = max(known.overtaken_in, generation)

    def _speaks_of(self, worker: Worker, known: Known, generation: int) -> None:
        places = sorted({known.before, known.placed})
        # Of a connection that was lost.
        late = known.reconnected and known.first <= generation < known.placed
        if generation not in places and not late:
            what = f"{worker} speaks of generation {generation}, expected one of {places}, its own"
            self._broken("NO MIXING", what)
        if generation < known.said and not known.reconnected:
            what = f"{worker} speaks of generation {generation} after {known.said}"
            self._broken("NO MIXING", what)
        known.said = max(generation, known.said)

    def _ready(self, worker: Worker, known: Known, event: WorkerReady) -> None:
        known.readies = event.number
        if known.going or (worker in self._members and event.generation != self._generation):
            return  # no part of any plan, or it has not seen its new world yet
        if event.commit is not None and known.holds is not None and event.commit < known.holds:
            what = f"{worker} is ready with commit {event.commit}, expected at least {known.holds}"
            self._broken("NEVER BACK", what)
        if self._stop_at is not None and worker in self._members and event.running:
            self._stopped(worker, known, event.commit, Commit(self._generation, self._stop_at))
        self._not_from_outside(worker, known, event.commit)
        known.commit = known.holds = event.commit
        known.running, known.ready = event.running, True
        if self._first_ready_at is None:
            self._first_ready_at = self._now
            for each, other in self._workers.items():
                self._awaits_init(each, other)

    def _stopped(self, worker: Worker, known: Known, commit: Commit | None, agreed: Commit) -> None:
        if known.reconnected and commit != agreed:
            self._stop_at = None  # a collective broke at it, and the word of that was lost
        elif commit is not None and commit != agreed:
            what = f"{worker} has stopped with commit {commit}, expected {agreed}, like all others"
            self._broken("NEVER BACK", what)

    def _resumed(self, worker: Worker, known: Known, event: WorkerResumed) -> None:
        if known.resumed == event.generation and not known.reconnected:
            self._broken("NO MIXING", f"{worker} resumed twice in generation {event.generation}")
        known.resumed = event.generation
        self._trained = self._trained or event.generation == self._generation
        if event.generation == known.placed and not known.ready:
            self._has(known, Commit(event.generation, 0))

    def _has(self, known: Known, commit: Commit) -> None:
        known.holds = commit if known.holds is None else max(known.holds, commit)

    def _counts_on(self, worker: Worker, known: Known, event: WorkerDigested) -> None:
        """Commits of one worker in one generation do not go back; one may be reported in several parts."""
        generation, commit = event.generation, event.commit
        if commit.generation > generation:
            what = f"{worker} reports commit {commit} while in generation {generation}"
            self._broken("NO MIXING", what)
        late = known.reconnected and known.first <= commit.generation < known.placed
        if not commit.generation or not (commit.generation in (known.before, known.placed) or late):
            what = f"{worker} reports commit {commit}, and was in no world of generation"
            self._broken("NO MIXING", f"{what} {commit.generation}")
        last = known.digested
        if last is None or last < (generation, commit):
            known.digested = (generation, commit)
        elif last[0] == generation and commit < last[1] and generation > known.overtaken_in:
            what = f"{worker} reports commit {commit} after {last[1]}"
            self._broken("NEVER BACK", what)

    def _digested(self, worker: Worker, known: Known, event: WorkerDigested) -> None:
        commit = event.commit
        self._counts_on(worker, known, event)
        self._not_from_outside(worker, known, commit)
        if event.digest:
            digest, first = self._digests.setdefault(commit, (event.digest, str(worker)))
            self._compared += first != str(worker)
            if digest != event.digest:
                what = (
                    f"{worker} has {event.digest:x} under commit {commit}, {first} has {digest:x}"
                )
                self._broken("EQUAL DIGESTS", what)
        if event.generation == known.placed and not known.ready and not known.going:
            self._has(known, commit)
        wrong = self._samples.reported(worker, commit, event.epoch, event.samples)
        if wrong:
            self._broken("EACH SAMPLE ONCE", wrong)

    def _not_from_outside(self, worker: Worker, known: Known, commit: Commit | None) -> None:
        if commit is None or worker in self._members or known.going or known.stranded:
            return
        newer = self._base is None or commit > self._base
        if commit.generation < self._generation and newer:
            began = f"generation {self._generation} began from {self._base}"
            what = f"{worker}, in no world since {known.placed}, has commit {commit}, and {began}"
            self._broken("NO OLDER COMMIT", what)
