"""Follows a job's journal as it grows: who trains, under which process ids, how many commits there were.

`Story` is pure: entries in, facts out. `Follower` reads the file. Neither acts on anything.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from elastic.protocol.messages import Worker

CHUNK = 1 << 20  # bytes read in one go

_decode = msgspec.json.Decoder().decode

Json = dict[str, Any]


class Heard(Protocol):
    """What is made of a journal."""

    def hear(self, entry: Json) -> None:
        """The next one that has an event."""


S = TypeVar("S", bound=Heard)


@dataclass
class Story:
    """What the entries so far have told. Times are the driver's clock, which is this machine's monotonic one."""

    began_at: float | None = None  # training: a first collective in a world of elastic.run
    generation: int = 0
    members: list[Worker] = field(default_factory=list)  # of the newest world, by rank, not gone
    pids: dict[Worker, int] = field(default_factory=dict)  # connected and not gone, oldest first
    commits: int = 0  # reported by at least one worker, each counted once; none without digests
    ending: bool = False  # a worker has returned, or it is to stop, or the outcome is decided
    no_steps: bool = False  # a worker has committed a state without shards: nobody counts its steps
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
                # Number 0 is the state that a world began with, which nobody has committed in it.
                commit = (event["commit"][0], event["commit"][1])
                if commit[1] and event.get("step", -1) < 0:
                    self.no_steps = True
                if commit[1] and commit > self._newest:
                    self._newest = commit
                    self.commits += 1

    def present(self) -> list[Worker]:
        """The members whose process ids are known, by rank."""
        return [worker for worker in self.members if worker in self.pids]

    def arrived(self) -> list[Worker]:
        """The same, the oldest first."""
        return [worker for worker in self.pids if worker in self.members]


class Follower(Generic[S]):
    """Reads what has been appended since it last looked. The file may not be there yet; a line that is no entry means
    nothing.

    A line that is not whole yet is read again: if its driver dies, the next one cuts it off and writes another.
    """

    def __init__(self, path: Path, story: S) -> None:
        self.story = story
        self._path = path
        self._offset = 0  # of the first line that was not heard

    def look(self) -> S:
        """Hears every line that is whole by now."""
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
