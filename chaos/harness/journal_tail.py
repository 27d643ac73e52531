"""Reader of a running job's journal: members, process IDs, number of commits.

`JobProgress` is pure, and `JournalTail` reads the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec

from elastic.driver import events
from elastic.driver.journal.entries import entry_of
from elastic.driver.journal.segment_files import older_segments
from elastic.driver.monitoring.job_view import JobView, ViewReader
from elastic.protocol.messages import Commit, Worker

CHUNK = 1 << 20  # number of bytes per read

_decode = msgspec.json.Decoder().decode

Json = dict[str, Any]


class JournalState(Protocol):
    """Interface of objects that are updated with the entries of a journal."""

    def update(self, entry: Json) -> None:
        """Update the state with the next journal entry that contains an event."""


S = TypeVar("S", bound=JournalState)


class JobProgress(ViewReader):
    """State of a job according to the entries read so far. Times are in seconds on this machine's monotonic clock."""

    def __init__(self, members: Sequence[Worker] = ()) -> None:
        """Initialize the state before the first entry.

        Args:
            members: members of the world before the first entry. Required only if the journal is not read from its
                beginning.
        """
        self.view = JobView()
        self.view.adopt({worker: (0, rank) for rank, worker in enumerate(members)}, 0, 0.0)
        # time at which training began: the first collective in a world of elastic.run
        self.began_at: float | None = None
        # commits that at least one worker has reported; 0 if the job reports no digests
        self.commits = 0
        # whether a worker has returned, a stop was requested, or the outcome is decided
        self.ending = False
        # whether a worker committed a state without shards, in which case its steps are not counted
        self.no_steps = False
        self._newest = Commit(0, 0)
        self.view.follow(self)

    def update(self, entry: Json) -> None:
        read = entry_of(entry)
        self.view.note(read.event, read.actions, read.at)

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        match event:
            case events.WorkerResumed() | events.WorkersResumed():
                self.began_at = now if self.began_at is None else self.began_at
            case events.WorkerReturned() | events.StopRequested():
                self.ending = True
            case events.WorkerDigested(commit=commit, step=step) if commit.number:
                # Commit 0 is the initial state of a world and does not count.
                self.no_steps = self.no_steps or step < 0
                if commit > self._newest:
                    self._newest = commit
                    self.commits += 1
            case _:
                pass

    def decided(self, action: events.Action, now: float) -> None:
        self.ending = self.ending or isinstance(action, events.EndJob)

    @property
    def generation(self) -> int:
        return self.view.generation

    @property
    def members(self) -> list[Worker]:
        """Return the members of the newest world by rank. Members that have exited are omitted."""
        return [worker for worker in self.view.ranks if worker in self.view.workers]

    @property
    def pids(self) -> dict[Worker, int]:
        """Process IDs of connected workers that have not exited, oldest first."""
        connected = [each for each in self.view.workers.values() if each.pid]
        connected.sort(key=lambda each: each.connected_at or 0.0)
        return {each.worker: each.pid for each in connected}

    def present(self) -> list[Worker]:
        """Return the members with known process IDs, by rank."""
        pids = self.pids
        return [worker for worker in self.members if worker in pids]

    def arrived(self) -> list[Worker]:
        """Return the members with known process IDs, oldest process first."""
        members = self.members
        return [worker for worker in self.pids if worker in members]


class JournalTail(Generic[S]):
    """Reader of the entries that were appended to a journal since the last call of `look`.

    The file may not exist yet. Lines that are not entries are ignored. An incomplete last line is not processed, and is
    read again at the next call. If the driver begins a new segment, the rest of the previous ones is read first.
    """

    def __init__(self, path: Path, story: S) -> None:
        self.story = story
        self._path = path
        self._offset = 0  # offset of the first unprocessed line
        self._segment: os.stat_result | None = None  # the file to which the offset belongs

    def look(self) -> S:
        """Process all complete lines that were appended since the last call. Return the updated state."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._segment is not None and not os.path.samestat(self._segment, found):
                self._finish_older(self._segment, found)
            self._segment = found
            self._read(file)
        return self.story

    def _finish_older(self, begun: os.stat_result, current: os.stat_result) -> None:
        """Read the rest of the segment ``begun``, and all segments between it and ``current``."""
        reads = False
        for path in older_segments(self._path).values():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                found = os.fstat(file.fileno())
                if os.path.samestat(found, current):
                    break
                reads = reads or os.path.samestat(found, begun)
                if reads:
                    self._read(file)
                    self._offset = 0
        self._offset = 0

    def _read(self, file: BinaryIO) -> None:
        file.seek(self._offset)
        rest = b""
        while data := file.read(CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                self._apply(line)

    def _apply(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            entry = _decode(line)
            if isinstance(entry, dict) and entry.get("event"):
                self.story.update(entry)
