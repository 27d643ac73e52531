"""Facts from the journal of a job of the fault matrix so far. Pure.

Workers are named as in ``localhost:2#1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.chaos.harness.journal_tail import Json
from stress.fault_matrix.expectations import WORKERS

COMMITS = 2  # minimum in a world that counts as training


@dataclass
class JournalFacts:
    """The newest world, and the state of the workers."""

    entries: list[Json] = field(default_factory=list)
    members: list[str] = field(default_factory=list)  # members of the newest world, by rank
    ever: set[str] = field(default_factory=set)  # members of any world so far
    generation: int = 0
    changing: bool = False  # a change of that world was decided after its publication
    resumed: set[str] = field(default_factory=set)  # workers that resumed in that world
    commits: int = 0  # commits made in that world
    order: list[str] = field(default_factory=list)  # order in which the workers connected
    exited: dict[str, int] = field(default_factory=dict)  # code
    standbys: list[str] = field(default_factory=list)  # all workers that were asked to stand by
    durable_in: int = 0  # the generation of the newest durable commit

    def update(self, entry: Json) -> None:
        """Process the next line of the journal."""
        self.entries.append(entry)
        event = entry["event"]
        match event["type"]:
            case "WorkerConnected":
                self.order.append(named(event["worker"]))
            case "WorkerExited":
                self.exited[named(event["worker"])] = event["code"]
            case "CheckpointMade":
                self.durable_in = event["commit"][0]
            case "WorkerResumed" if event["generation"] == self.generation:
                self.resumed.add(named(event["worker"]))
            case "WorkersResumed" if event["generation"] == self.generation:
                self.resumed |= set(map(named, event["workers"]))
            case "WorkerDigested" if event["commit"][0] == self.generation:
                self.commits = max(self.commits, event["commit"][1])
        for action in entry.get("actions") or ():
            match action["type"]:
                case "PublishWorld":
                    self.members = [named(m["worker"]) for m in action["members"]]
                    self.ever |= set(self.members)
                    self.generation = action["generation"]
                    self.resumed, self.commits, self.changing = set(), 0, False
                case "TellStandby":
                    self.standbys.append(named(action["worker"]))
                case "BreakWorld" | "PrepareChange":
                    self.changing = True
                case "CallOffChange":
                    self.changing = False

    @property
    def full(self) -> bool:
        """Whether all workers train."""
        return (
            len(self.members) == WORKERS
            and self.resumed >= set(self.members)
            and self.commits >= COMMITS
            and not self.changing
            and not self.exited.keys() & set(self.members)
        )

    @property
    def stands_by(self) -> bool:
        """Whether a standby waits for a place."""
        return bool({*self.standbys} - {*self.exited} - {*self.members})

    @property
    def durable(self) -> bool:
        """Whether this world has a durable commit."""
        return bool(self.durable_in) and self.durable_in == self.generation

    @property
    def newest(self) -> str:
        """The member that connected last."""
        return max(self.members, key=self.order.index, default="")

    def actions(self, kind: str, since: int) -> list[Json]:
        """Return the actions of a type since an entry."""
        return [a for entry in self.entries[since:] for a in _actions(entry) if a["type"] == kind]

    def broken(self, since: int) -> bool:
        """Return whether a world was broken since an entry."""
        return bool(self.actions("BreakWorld", since))

    def recovered_at(self, after: float) -> float | None:
        """Return the first time at which all members of a world had resumed."""
        for entry in self.entries:
            if entry["at"] > after and any(a["type"] == "ReportRecovery" for a in _actions(entry)):
                return float(entry["at"])
        return None

    def __str__(self) -> str:
        names = ", ".join(self.members) or "nobody"
        return f"generation {self.generation} of {names}; {len(self.resumed)} resumed"


def named(worker: Sequence[Any]) -> str:
    """Format a worker of the journal."""
    host, slot, incarnation = worker
    return f"{host}:{slot}#{incarnation}"


def _actions(entry: Json) -> Iterator[Json]:
    yield from entry.get("actions") or ()
