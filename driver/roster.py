"""What membership knows about each live process, and the questions it asks of all of them. Decides nothing."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic.protocol import Address, Commit, Place, Worker


class Stage(enum.Enum):
    """How far a live process has come."""

    STARTING = "starting"  # the process runs, init() was not called yet
    CONNECTED = "connected"  # in init(), or in user code before elastic.run
    READY = "ready"  # waits for a world
    MEMBER = "member"  # part of the present world
    RETURNED = "returned"  # its function returned; keeps its sockets until all have
    FINISHED = "finished"  # told that all is done; user code after elastic.run may still go on
    DISMISSED = "dismissed"  # told to leave, or about to die: not part of any plan


@dataclass
class Standing:
    """One live process. ``_at`` are times, ``_by`` deadlines, in seconds on the caller's clock."""

    worker: Worker
    started_at: float
    first_place: Place  # what it was promised at its start
    stage: Stage = Stage.STARTING
    pid: int = 0
    commit: Commit | None = None
    store: Address | None = None
    layout: str = ""
    running: bool = False  # inside elastic.run
    resumed_at: float | None = None  # its first collective completed
    leaving: str = ""  # why it wants or has to leave; empty: it stays
    unlisted: bool = False  # leaving because its host left the list, so there is no hurry
    exit_by: float | None = None  # must be gone by then, or is killed
    exit_why: str = ""  # said when it is killed for that
    killed_for: str = ""  # why a kill was ordered; empty: none was

    @property
    def slot(self) -> tuple[str, int]:
        return self.worker.host, self.worker.slot

    @property
    def in_plans(self) -> bool:
        """Whether it may be part of the next world."""
        return self.stage not in (Stage.FINISHED, Stage.DISMISSED)

    @property
    def hurried(self) -> bool:
        """Whether it leaves however few stay."""
        return bool(self.leaving) and not self.unlisted


class Roster(dict[Worker, Standing]):
    """Every live process, by worker."""

    def staying(self) -> int:
        """How many are here to stay."""
        return sum(1 for s in self.values() if s.in_plans and not s.leaving)

    def in_plans(self) -> Iterator[Standing]:
        return (s for s in self.values() if s.in_plans)

    def at(self, *stages: Stage) -> list[Standing]:
        return [s for s in self.values() if s.stage in stages]

    def live(self, members: Iterable[Worker]) -> list[Standing]:
        """Those of ``members`` that live and were not dismissed, in that order."""
        found = (self.get(worker) for worker in members)
        return [s for s in found if s is not None and s.stage is not Stage.DISMISSED]
