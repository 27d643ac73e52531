"""Reader of a job's journal while it grows: members, process ids, number of commits.

`JobProgress` is pure, `JournalTail` reads the file.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from elastic.protocol.messages import Worker

CHUNK = 1 << 20  # bytes per read

_decode = msgspec.json.Decoder().decode

Json = dict[str, Any]


class Heard(Protocol):
    """State that is built from the entries of a journal."""

    def hear(self, entry: Json) -> None:
        """Process the next entry that has an event."""


S = TypeVar("S", bound=Heard)


@dataclass
class JobProgress:
    """Facts from the entries so far. Times are the driver's clock, which is this machine's monotonic one."""

    # start of training: the first collective in a world of elastic.run
    began_at: float | None = None
    generation: int = 0
    # of the newest world, by rank, without exited ones
    members: list[Worker] = field(default_factory=list)
    # connected workers that have not exited, oldest first
    pids: dict[Worker, int] = field(default_factory=dict)
    commits: int = 0  # reported by at least one worker, each counted once; 0 without digests
    # a worker has returned, or a stop was requested, or the outcome is decided
    ending: bool = False
    # a worker has committed a state without shards, so its steps are not counted
    no_steps: bool = False
    _newest: tuple[int, int] = (0, 0)

    def hear(self, entry: Json) -> None:
        self._event(entry["event"], entry.get("at", 0.0))
        for action in entry.get("actions") or ():
            match action["type"]:
                case "PublishWorld":
                    self.generation = action["generation"]
                    self.members = [Worker(*member["worker"]) for member in action["members"]]
                case "EndJob":
                    self.ending = True

    def _event(self, event: Json, at: float) -> None:
        match event["type"]:
            case "WorkerConnected":
                self.pids[Worker(*event["worker"])] = event["pid"]
            case "WorkerExited":
                worker = Worker(*event["worker"])
                self.pids.pop(worker, None)
                if worker in self.members:
                    self.members.remove(worker)
            case "WorkerResumed":
                self.began_at = at if self.began_at is None else self.began_at
            case "WorkerReturned" | "StopRequested":
                self.ending = True
            case "WorkerDigested":
                # Number 0 is the initial state of a world, not a commit.
                commit = (event["commit"][0], event["commit"][1])
                if commit[1] and event.get("step", -1) < 0:
                    self.no_steps = True
                if commit[1] and commit > self._newest:
                    self._newest = commit
                    self.commits += 1

    def present(self) -> list[Worker]:
        """Return the members whose process ids are known, by rank."""
        return [worker for worker in self.members if worker in self.pids]

    def arrived(self) -> list[Worker]:
        """Return the same members, oldest first."""
        return [worker for worker in self.pids if worker in self.members]


class JournalTail(Generic[S]):
    """Reads the entries that were appended since the last look.

    The file may not exist yet; lines that are no entries are ignored. An incomplete line is read again: if its driver
    dies, the next driver truncates it and writes another.
    """

    def __init__(self, path: Path, story: S) -> None:
        self.story = story
        self._path = path
        self._offset = 0  # offset of the first unprocessed line

    def look(self) -> S:
        """Process all complete lines."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while data := file.read(CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    self._hear(line)
        return self.story

    def _hear(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            entry = _decode(line)
            if isinstance(entry, dict) and entry.get("event"):
                self.story.hear(entry)
