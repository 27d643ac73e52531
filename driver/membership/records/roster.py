"""Records of all live worker processes, and queries over them. Makes no decisions."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.reasons import Reason
from elastic.protocol.messages import Address, Commit, KeptCommit, Launches, Place, Worker

INDEXED = frozenset({"stage", "leaving", "noticed", "exit_by", "killed_for", "frozen", "inside"})


class WorkerStage(enum.Enum):
    """Stage of a live worker process, from its start to its exit."""

    STARTING = "starting"  # the process runs but has not called init() yet
    # the worker called init(), which returns when the health check of its slot has passed
    HELD = "held"
    CONNECTED = "connected"  # the worker is in init(), or in user code before elastic.run
    READY = "ready"  # the worker waits for a world
    MEMBER = "member"  # the worker is a member of the current world
    # the function passed to elastic.run has returned; the worker keeps its sockets open until it has returned on all
    # members
    RETURNED = "returned"
    # the worker was notified that the function has returned on all members; user code after elastic.run may still run
    FINISHED = "finished"
    # the worker was asked to leave or is about to exit; plans exclude it
    DISMISSED = "dismissed"

    # Stages are dict keys in frequent lookups, and the default hash of an enum is computed in Python, which is slow.
    __hash__ = object.__hash__


# Stages in which other workers train with the worker, or are about to.
AT_STAKE = (WorkerStage.READY, WorkerStage.MEMBER, WorkerStage.RETURNED)


@dataclass(eq=False)
class WorkerRecord:
    """State of one live worker process.

    Fields ending in ``_at`` are times and in ``_by`` deadlines, in seconds on the caller's clock.
    """

    worker: Worker
    started_at: float
    first_place: Place  # ranks and sizes assigned to the worker at its start
    stage: WorkerStage = WorkerStage.STARTING
    pid: int = 0
    unchecked: bool = False  # whether the health check of the worker's slot is still pending
    # time until which the first world waits for this worker, if the worker is HELD
    held_until: float = 0.0
    check_by: float = 0.0  # time at which the health check times out, if the worker is HELD
    commit: Commit | None = None
    kept: tuple[KeptCommit, ...] = ()  # older commits that the worker still holds
    # first world in which the worker trained; 0 if it has not trained yet
    first_generation: int = 0
    store: Address | None = None
    # of the worker's latest Ready message, None if empty
    metadata: dict[str, str] | None = None
    source: dict[str, str] | None = None  # None also after a world has been published
    layout: str = ""
    running: bool = False  # whether the worker is inside elastic.run
    # time at which the worker's first collective of the generation completed
    resumed_at: float | None = None
    leaving: Reason | None = None  # reason for the worker to leave, or None
    # whether the worker leaves because its host is no longer listed, which is not urgent
    unlisted: bool = False
    # Whether the worker must leave because its machine will be reclaimed, but not immediately.
    noticed: bool = False
    # time at which the driver kills the worker if it has not exited
    exit_by: float | None = None
    exit_why: Reason | None = None  # reason for the kill at `exit_by`
    killed_for: Reason | None = None  # reason why the worker is being killed, or None
    # whether the worker was notified that it must wait because all places are taken
    stands_by: bool = False
    rejected: str = ""  # digest of the layout that a rejected worker should have had
    readies: int = 0  # sequence number in the worker's latest Ready message
    frozen: str = ""  # reason why the agent reports the worker as frozen, or empty
    # name of the collective of the current generation in which the worker waits, or empty
    inside: str = ""
    # name of the last collective in which the worker waited, in any generation
    last_inside: str = ""
    line: str = ""  # script line that the worker executes, as last reported
    said_at: float = 0.0  # time of the worker's last report
    # progress of the worker's GPU at the last report
    gpu: list[Launches] = field(default_factory=list)
    gpu_since: float = 0.0  # time of the last change in the GPU's progress
    # number of collectives that the worker has entered in the current generation, as last reported
    entered: int = 0
    phase: str = ""  # name of the current phase that the script marks as long; empty if none
    # time at which the worker entered a collective, became ready, or returned
    waits_since: float = 0.0
    moved_at: float = 0.0  # time of the worker's last known progress

    _filed: Callable[[WorkerRecord, str], None] | None = field(default=None, repr=False)

    @property
    def slot(self) -> tuple[str, int]:
        return self.worker.host, self.worker.slot

    @property
    def in_plans(self) -> bool:
        """Whether the worker may be a member of the next world."""
        return self.stage not in (WorkerStage.FINISHED, WorkerStage.DISMISSED)

    @property
    def patient(self) -> bool:
        """Whether the worker leaves only if enough other workers stay."""
        return self.unlisted or self.noticed

    @property
    def hurried(self) -> bool:
        """Whether the worker leaves even if too few workers stay."""
        return self.leaving is not None and not self.patient

    def moved(self, now: float) -> None:
        """Record that the worker made progress. This ends its wait in a collective and all earlier suspicions."""
        if self.inside:
            self.inside = ""
        self.moved_at = now


class _Indexed:
    """Data descriptor for a field whose changes update the roster's indexes.

    The value is stored in the record's ``__dict__``. Without a ``__get__`` method, reading the field is as fast as
    reading any other.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __set__(self, record: WorkerRecord, value: Any) -> None:
        fields = record.__dict__
        fields[self._name] = value
        filed = fields.get("_filed")
        if filed is not None:
            filed(record, self._name)


for _name in INDEXED:
    setattr(WorkerRecord, _name, _Indexed(_name))


class Roster(dict[Worker, WorkerRecord]):
    """Collection of all live worker processes, with indexes for frequent queries."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0  # counter, incremented when a process is added or removed
        # counter, incremented when a worker changes in a way that may affect decisions
        self.shifts = 0
        self.leavers: dict[Worker, WorkerRecord] = {}
        # Heap of exit deadlines. May contain outdated entries, which are skipped.
        self._exits: list[tuple[float, int, Worker]] = []
        self._filed_exits = 0
        self.inside: dict[Worker, WorkerRecord] = {}  # members that are waiting in a collective
        # frozen workers that are ready or members and are not being killed
        self.frozen: dict[Worker, WorkerRecord] = {}
        self.hosts: dict[str, dict[Worker, WorkerRecord]] = {}
        # OrderedDicts, because finding the first item of a plain dict is slow after many removals.
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
        """Remove an exited process and return its record, or None if the process is unknown."""
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
        if name == "stage":
            stage, before = record.stage, self._stage_of.get(worker)
            if before is not stage:
                if before is not None:
                    del self._stages[before][worker]
                self._stages[stage][worker] = record
                self._stage_of[worker] = stage
        # Both indexes are usually empty, in which case there is nothing to delete.
        if record.leaving is not None:
            self.leavers[worker] = record
        elif self.leavers:
            self.leavers.pop(worker, None)
        hale = record.killed_for is None
        if record.inside and hale and record.stage is WorkerStage.MEMBER:
            self.inside[worker] = record
        elif self.inside:
            self.inside.pop(worker, None)
        if record.frozen and hale and record.stage in AT_STAKE:
            self.frozen[worker] = record
        elif self.frozen:
            self.frozen.pop(worker, None)

    def move(self, records: Sequence[WorkerRecord], stage: WorkerStage) -> None:
        """Set the stage of distinct workers in the roster. Equivalent to setting ``stage`` of each, but faster."""
        before = records[0].stage if records else stage
        for record in records:
            if (
                record.stage is not before
                or record.leaving is not None
                or record.inside
                or record.frozen
            ):
                # The records have different stages, or may be in other indexes as well.
                for each in records:
                    each.stage = stage
                return
        self.shifts += len(records)
        if before is stage:
            return
        for record in records:
            record.__dict__["stage"] = stage
        workers = [record.worker for record in records]
        left = self._stages[before]
        if len(left) == len(records):
            left.clear()
        else:
            for worker in workers:
                del left[worker]
        self._stages[stage].update(zip(workers, records, strict=True))
        self._stage_of.update(zip(workers, itertools.repeat(stage), strict=False))

    def first_exit_by(self) -> float | None:
        """Return the earliest deadline for an exit."""
        while self._exits:
            exit_by, _, worker = self._exits[0]
            record = self.get(worker)
            if record is not None and record.exit_by == exit_by:
                return exit_by
            heapq.heappop(self._exits)
        return None

    def overdue(self, now: float) -> list[WorkerRecord]:
        """Return the workers whose exit is overdue, earliest deadline first, and clear their deadlines.

        The caller may set new deadlines.
        """
        found: dict[Worker, WorkerRecord] = {}
        while (exit_by := self.first_exit_by()) is not None and exit_by <= now:
            worker = heapq.heappop(self._exits)[2]
            found[worker] = self[worker]
        return list(found.values())

    def at(self, *stages: WorkerStage) -> list[WorkerRecord]:
        """Return the workers in these stages, in the order in which they entered them."""
        return [record for stage in stages for record in self._stages[stage].values()]

    def count(self, stage: WorkerStage) -> int:
        """Return the number of workers in a stage."""
        return len(self._stages[stage])

    def any_at(self, *stages: WorkerStage) -> bool:
        return any(self._stages[stage] for stage in stages)

    def first_at(self, *stages: WorkerStage) -> Iterator[WorkerRecord]:
        """Iterate over the workers in these stages, in the order of `at`."""
        return (record for stage in stages for record in self._stages[stage].values())

    def staying(self) -> int:
        """Return the number of workers that are not leaving."""
        here = (
            len(self)
            - len(self._stages[WorkerStage.FINISHED])
            - len(self._stages[WorkerStage.DISMISSED])
        )
        return here - sum(s.in_plans for s in self.leavers.values()) if self.leavers else here

    def in_plans(self) -> Iterator[WorkerRecord]:
        return (s for s in self.values() if s.in_plans)

    def live(self, members: Iterable[Worker]) -> list[WorkerRecord]:
        """Return the records of all ``members`` that are alive and not dismissed, in the order of ``members``."""
        dismissed = WorkerStage.DISMISSED
        return [s for s in map(self.get, members) if s is not None and s.stage is not dismissed]
