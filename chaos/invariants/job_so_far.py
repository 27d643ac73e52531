"""What a journal has told so far, as all invariants see it. Pure. See `invariants`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from elastic.chaos.invariants.deadlines import Waits
from elastic.chaos.invariants.sample_history import SampleHistory
from elastic.driver.events import EndJob, Event
from elastic.driver.journal.entries import describe
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
    said: int = 0  # the newest generation it spoke of ...
    said_at_first: int = 0  # ... on its first connection
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
    noticed: bool = False  # its machine announced its end while it was there
    silent: bool = False  # it was asked for a sign of life, and has given none since


class JobSoFar:
    """Workers, worlds and waits, after some lines of a journal."""

    def __init__(self, settings: Settings, samples: int) -> None:
        self.settings = settings
        self.now = 0.0
        self.line = 1  # the journal's first one has the settings
        self.event: Event | None = None
        self.workers: dict[Worker, Known] = {}
        self.slots: dict[tuple[str, int], Worker] = {}
        self.incarnations: dict[tuple[str, int], int] = {}  # the last one started in each slot
        self.departed: dict[tuple[str, int], tuple[Worker, Known]] = {}  # the last one gone
        self.ended_well: dict[tuple[str, int], Known] = {}  # with exit code 0, and unasked
        self.hosts: dict[str, int] = {}
        self.going_hosts: dict[str, float] = {}  # announced: when they end
        self.drained: set[str] = set()  # hosts that an operator wants empty
        self.workers_max = settings.workers_max  # as an operator has wanted it last
        self.shrinks = False  # ... and there may be more yet
        self.generation = 0
        self.members: dict[Worker, int] = {}  # of the present world: rank
        self.base: Commit | None = None  # the present world began from it
        self.trained = False
        # The newest commit in the storage, as the driver has heard.
        self.durable: Commit | None = None
        self.broken_at: float | None = None
        self.first_ready_at: float | None = None
        self.checks: dict[Worker, int] = {}  # answers to the change under way
        self.stop_at: int | None = None  # the check at which all members are to stop
        self.digests: dict[Commit, tuple[int, str]] = {}
        self.compared = 0
        self.samples = SampleHistory(samples)
        self.waits = Waits()
        self.finished = False  # some have returned and were released
        self.repeating = False  # what is answered says again what holds
        self.end: EndJob | None = None

    def broken(self, invariant: str, what: str) -> NoReturn:
        said = f"at {self.now:.3f}, {describe(self.event)}" if self.event else "the last"
        raise BrokenInvariant(f"{invariant}: {what} (line {self.line}, {said})")

    def must(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            self.broken(invariant, what)

    def here(self) -> list[tuple[Worker, Known]]:
        """The members whose processes run."""
        return [(w, self.workers[w]) for w in self.members if w in self.workers]

    def goes(
        self, worker: Worker, known: Known, why: str, *, exit_within: float | None = None
    ) -> None:
        """It may be part of no later world."""
        known.going = known.going or why
        self.waits.end(("link", worker))
        if exit_within is not None:
            what = f"expected {worker}, which {why}, to exit"
            self.waits.begin(("exit", worker), self.now + exit_within, what)

    def gathers(self) -> None:
        by = self.now + 2 * self.settings.elastic_timeout_s + self.settings.leave_s
        self.waits.begin("gathering", by, "expected a new world")

    def awaits_init(self, worker: Worker, known: Known) -> None:
        if not known.connected and not known.going:
            by = self.now + self.settings.start_timeout_s
            self.waits.begin(("init", worker), by, f"expected {worker} to call init()")
