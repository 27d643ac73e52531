"""The state of each live process, and queries over all of them. Decides nothing."""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.reasons import Reason
from elastic.protocol.messages import Address, Commit, Launches, Place, Worker

INDEXED = ("stage", "leaving", "noticed", "exit_by", "killed_for", "frozen", "inside")


class WorkerStage(enum.Enum):
    """How far a live process has come."""

    STARTING = "starting"  # the process runs, init() was not called yet
    CONNECTED = "connected"  # in init(), or in user code before elastic.run
    READY = "ready"  # waits for a world
    MEMBER = "member"  # part of the present world
    RETURNED = "returned"  # its function returned; keeps its sockets until all have
    FINISHED = "finished"  # told that all is done; user code after elastic.run may still go on
    DISMISSED = "dismissed"  # told to leave, or about to die: not part of any plan

    # The roster looks stages up many times in each event, and an enum's own hash is computed in Python.
    __hash__ = object.__hash__


# Others train with it, or are about to.
AT_STAKE = (WorkerStage.READY, WorkerStage.MEMBER, WorkerStage.RETURNED)


@dataclass(eq=False)
class WorkerRecord:
    """One live process. ``_at`` are times, ``_by`` deadlines, in seconds on the caller's clock."""

    worker: Worker
    started_at: float
    first_place: Place  # what it was promised at its start
    stage: WorkerStage = WorkerStage.STARTING
    pid: int = 0
    commit: Commit | None = None
    store: Address | None = None
    layout: str = ""
    running: bool = False  # inside elastic.run
    resumed_at: float | None = None  # its first collective completed
    leaving: Reason | None = None  # why it wants or has to leave; None: it stays
    unlisted: bool = False  # leaving because its host left the list, so there is no hurry
    # Leaving because its machine has announced its end, and there is time yet.
    noticed: bool = False
    exit_by: float | None = None  # must be gone by then, or is killed
    exit_why: Reason | None = None  # given when it is killed for that
    killed_for: Reason | None = None  # why a kill was ordered; None: none was
    stands_by: bool = False  # was told that it has to wait for a place
    rejected: str = ""  # the digest of the layout that its own should have been
    readies: int = 0  # the number of its latest Ready
    frozen: str = ""  # how, as its agent sees it; empty: it runs
    inside: str = ""  # the collective of the present generation that it waits in
    last_inside: str = ""  # ... or waited in before
    line: str = ""  # of the script, at which it is, as it said last
    said_at: float = 0.0  # when it said so last
    gpu: list[Launches] = field(default_factory=list)  # how far its GPU is, as it said then
    gpu_since: float = 0.0  # it has said the same
    entered: int = 0  # collectives of the present generation, when it was last heard of
    phase: str = ""  # what the user marks as long
    waits_since: float = 0.0  # inside a collective, ready, or returned
    moved_at: float = 0.0  # it was last known to get on

    _filed: Callable[[WorkerRecord, str], None] | None = field(default=None, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """The roster hears of what it looks workers up by."""
        object.__setattr__(self, name, value)
        if name in INDEXED and self._filed is not None:
            self._filed(self, name)

    @property
    def slot(self) -> tuple[str, int]:
        return self.worker.host, self.worker.slot

    @property
    def in_plans(self) -> bool:
        """Whether it may be part of the next world."""
        return self.stage not in (WorkerStage.FINISHED, WorkerStage.DISMISSED)

    @property
    def patient(self) -> bool:
        """Whether it leaves only if enough others stay."""
        return self.unlisted or self.noticed

    @property
    def hurried(self) -> bool:
        """Whether it leaves however few stay."""
        return self.leaving is not None and not self.patient

    def moved(self, now: float) -> None:
        """The worker waits in no collective now; earlier suspicions do not count."""
        if self.inside:
            self.inside = ""
        self.moved_at = now


class Roster(dict[Worker, WorkerRecord]):
    """Every live process, by worker, and by what is asked for after each of very many events."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0  # grows when a process comes or goes
        self.shifts = 0  # grows when somebody's part in what comes next may have changed
        self.leavers: dict[Worker, WorkerRecord] = {}
        # A heap; those that were put off included.
        self._exits: list[tuple[float, int, Worker]] = []
        self._filed_exits = 0
        self.inside: dict[Worker, WorkerRecord] = {}  # members that wait in a collective
        self.frozen: dict[Worker, WorkerRecord] = {}  # ready or members, and not being killed
        self.hosts: dict[str, dict[Worker, WorkerRecord]] = {}
        # Ordered: the first of a plain dict takes long to find once many before it are gone.
        self._stages: dict[WorkerStage, OrderedDict[Worker, WorkerRecord]] = {
            s: OrderedDict() for s in WorkerStage
        }
        self._stage_of: dict[Worker, WorkerStage] = {}

    def __setitem__(self, worker: Worker, record: WorkerRecord) -> None:
        super().__setitem__(worker, record)
        self.version += 1
        self.hosts.setdefault(worker.host, {})[worker] = record
        record._filed = self._file
        for name in ("exit_by", "stage"):
            self._file(record, name)

    def remove(self, worker: Worker) -> WorkerRecord | None:
        """The process is gone; None if there was none."""
        record = self.get(worker)
        if record is None:
            return None
        del self[worker]
        self.version += 1
        self.shifts += 1
        record._filed = None
        del self._stages[self._stage_of.pop(worker)][worker]
        for index in (self.leavers, self.inside, self.frozen, self.hosts[worker.host]):
            index.pop(worker, None)
        return record

    def _file(self, record: WorkerRecord, name: str) -> None:
        worker = record.worker
        if name == "exit_by":
            if record.exit_by is not None:
                self._filed_exits += 1
                heapq.heappush(self._exits, (record.exit_by, self._filed_exits, worker))
            return
        self.shifts += name != "inside"
        before = self._stage_of.get(worker)
        if before is not record.stage:
            if before is not None:
                del self._stages[before][worker]
            self._stages[record.stage][worker] = record
            self._stage_of[worker] = record.stage
        hale = record.killed_for is None
        for index, belongs in (
            (self.leavers, record.leaving is not None),
            (self.inside, bool(record.inside) and hale and record.stage is WorkerStage.MEMBER),
            (self.frozen, bool(record.frozen) and hale and record.stage in AT_STAKE),
        ):
            if belongs:
                index[worker] = record
            else:
                index.pop(worker, None)

    def first_exit_by(self) -> float | None:
        """When the first must be gone."""
        while self._exits:
            exit_by, _, worker = self._exits[0]
            record = self.get(worker)
            if record is not None and record.exit_by == exit_by:
                return exit_by
            heapq.heappop(self._exits)
        return None

    def overdue(self, now: float) -> list[WorkerRecord]:
        """The workers that should have exited, the longest overdue first. Set another deadline for each, or none."""
        found: dict[Worker, WorkerRecord] = {}
        while (exit_by := self.first_exit_by()) is not None and exit_by <= now:
            worker = heapq.heappop(self._exits)[2]
            found[worker] = self[worker]
        return list(found.values())

    def at(self, *stages: WorkerStage) -> list[WorkerRecord]:
        """In the order in which they came there."""
        return [record for stage in stages for record in self._stages[stage].values()]

    def count(self, stage: WorkerStage) -> int:
        """How many are there."""
        return len(self._stages[stage])

    def any_at(self, *stages: WorkerStage) -> bool:
        return any(self._stages[stage] for stage in stages)

    def first_at(self, *stages: WorkerStage) -> Iterator[WorkerRecord]:
        """The same, one after the other."""
        return (record for stage in stages for record in self._stages[stage].values())

    def staying(self) -> int:
        """How many are here to stay."""
        here = (
            len(self)
            - len(self._stages[WorkerStage.FINISHED])
            - len(self._stages[WorkerStage.DISMISSED])
        )
        return here - sum(s.in_plans for s in self.leavers.values()) if self.leavers else here

    def in_plans(self) -> Iterator[WorkerRecord]:
        return (s for s in self.values() if s.in_plans)

    def live(self, members: Iterable[Worker]) -> list[WorkerRecord]:
        """The workers of ``members`` that are alive and were not dismissed, in that order."""
        found = (self.get(worker) for worker in members)
        return [s for s in found if s is not None and s.stage is not WorkerStage.DISMISSED]
