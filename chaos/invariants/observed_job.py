"""State of a job after replaying a part of its journal, shared by all invariants.

Pure: no I/O, no clock. See `invariants`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from elastic.chaos.invariants.deadlines import Deadlines
from elastic.chaos.invariants.sample_history import SampleHistory
from elastic.driver.events import BandwidthMeasured, EndJob, Event
from elastic.driver.journal.entries import describe
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker


class BrokenInvariant(AssertionError):
    """Error raised when an invariant is violated.

    The message contains the violation, the expected state and the line number in the journal.
    """


@dataclass(eq=False)
class LiveWorker:
    """State of a live worker, as known from the journal."""

    connected: bool = False
    first: int = 0  # first generation in which the worker had a place
    placed: int = 0  # newest generation in which the worker had a place
    before: int = 0  # generation before `placed` in which the worker had a place
    reported: int = 0  # newest generation in the worker's reports
    # newest generation in the worker's reports through its first connection
    reported_at_first: int = 0
    resumed: int = 0
    readies: int = 0  # sequence number of the worker's latest Ready message
    # whether the worker's connection was replaced, so messages may arrive repeatedly or in another order
    reconnected: bool = False
    overtaken_in: int = 0  # newest generation whose messages may be reordered
    # generation and commit of the worker's newest digest
    digested: tuple[int, Commit] | None = None
    returned: int = 0  # generation in which the worker's function returned
    # whether the worker was notified that all members' functions have returned
    finished: bool = False
    dismissed: bool = False  # whether the driver does not consider the worker a member
    # whether the worker was inside elastic.run when it sent its last Ready message
    running: bool = False
    ready: bool = False  # whether the worker has reported Ready since its last world began
    # whether the worker is allowed to stop at an earlier commit than the other members
    own_pace: bool = False
    commit: Commit | None = None  # commit in the worker's last Ready message
    metadata: dict[str, str] = field(default_factory=dict)  # metadata in that message
    # older commits in the worker's last Ready message
    kept: list[Commit] = field(default_factory=list)
    # generation of the first world of elastic.run of which the worker was a member
    trained_in: int = 0
    holds: Commit | None = None  # oldest commit that the worker may hold
    going: str = ""  # reason why the worker must not be in a later world; empty if it may be
    stranded: bool = False  # whether the worker's world failed outside elastic.run
    asked_to_leave: bool = False
    # whether a preemption notice for the worker's machine arrived while the worker lived
    noticed: bool = False
    healthy: bool | None = None  # result of the first health check, or None while it is pending
    silent: bool = False  # whether a liveness probe of the worker is unanswered


class ObservedJob:
    """Workers, worlds and pending deadlines of a job after replaying a part of its journal."""

    def __init__(self, settings: Settings, samples: int) -> None:
        self.settings = settings
        self.now = 0.0
        self.line = 1  # the first line contains the settings, not an event
        self.event: Event | None = None
        self.workers: dict[Worker, LiveWorker] = {}
        self.slots: dict[tuple[str, int], Worker] = {}
        # incarnation of the last worker started in each slot
        self.incarnations: dict[tuple[str, int], int] = {}
        # the last worker that exited in each slot
        self.departed: dict[tuple[str, int], tuple[Worker, LiveWorker]] = {}
        # last workers of their slots that exited with code 0 without a request to leave
        self.ended_well: dict[tuple[str, int], LiveWorker] = {}
        self.hosts: dict[str, int] = {}
        # time at which each host with a preemption notice ends
        self.going_hosts: dict[str, float] = {}
        self.drained: set[str] = set()  # hosts that an operator has drained
        # (host, slot) of slots in which no worker may be started
        self.quarantined: set[tuple[str, int]] = set()
        # bandwidth: the measurement in progress (host, peer), its start time, and the last result of each host
        self.measuring: tuple[str, str] | None = None
        self.measuring_since = 0.0
        self.bandwidth: dict[str, BandwidthMeasured] = {}
        # maximum number of workers, as last set by an operator
        self.workers_max = settings.workers_max
        # whether the maximum was reduced and the current world may still exceed it
        self.shrinks = False
        self.generation = 0
        self.members: dict[Worker, int] = {}  # rank of each member of the current world
        self.base: Commit | None = None  # the commit from which the current world began
        # (commit, generation): commits after ``commit`` up to ``generation`` may contain wrong gradients
        self.doubted: tuple[Commit, int] | None = None
        self.trained = False
        # The newest commit in durable storage, as reported to the driver.
        self.durable: Commit | None = None
        self.broken_at: float | None = None
        self.first_ready_at: float | None = None
        self.checks: dict[Worker, int] = {}  # members' safepoints for the planned change
        self.stop_at: int | None = None  # safepoint at which all members must stop
        self.digests: dict[Commit, tuple[int, str]] = {}
        self.compared = 0
        self.samples = SampleHistory(samples)
        self.waits = Deadlines()
        self.finished = False  # whether members were released after their return from elastic.run
        self.repeating = False  # whether the current actions repeat earlier decisions
        self.end: EndJob | None = None

    def broken(self, invariant: str, what: str) -> NoReturn:
        event = f"at {self.now:.3f}, {describe(self.event)}" if self.event else "the last"
        raise BrokenInvariant(f"{invariant}: {what} (line {self.line}, {event})")

    def must(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            self.broken(invariant, what)

    def here(self) -> list[tuple[Worker, LiveWorker]]:
        """Return the members of the current world whose processes are running."""
        return [(w, self.workers[w]) for w in self.members if w in self.workers]

    def goes(
        self, worker: Worker, known: LiveWorker, why: str, *, exit_within: float | None = None
    ) -> None:
        """Record that a worker must not be a member of any later world.

        Args:
            worker: the worker.
            known: its state.
            why: reason, for error messages.
            exit_within: seconds within which the worker must exit. None means no limit.
        """
        known.going = known.going or why
        self.waits.end(("link", worker))
        if exit_within is not None:
            what = f"expected {worker}, which {why}, to exit"
            self.waits.begin(("exit", worker), self.now + exit_within, what)

    def gathers(self) -> None:
        by = self.now + 2 * self.settings.elastic_timeout_s + self.settings.leave_s
        self.waits.begin("gathering", by, "expected a new world")

    def awaits_init(self, worker: Worker, known: LiveWorker) -> None:
        if not known.connected and not known.going:
            by = self.now + self.settings.start_timeout_s
            self.waits.begin(("init", worker), by, f"expected {worker} to call init()")
