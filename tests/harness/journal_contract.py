"""All stores for a journal, including fakes, with the operations that `test_journal_contract` requires.

A store has an archive for every driver. It can simulate a killed driver and one that leaves half a record behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from elastic.driver.etcd.client import Item, Listing
from elastic.driver.etcd.journal import EtcdArchive
from elastic.driver.etcd.leader_election import LeadershipLost
from elastic.driver.events import Event, TimePassed, WorkerRaised
from elastic.driver.journal.entries import Entry, Header, Resumed, Snapshot, Writer, encoded
from elastic.driver.journal.file_journal import FileArchive
from elastic.driver.journal.journal import Archive, Journal, SnapshotPolicy
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.resume import past_of
from elastic.driver.journal.rotation import SegmentLimits
from elastic.driver.journal.segment_files import older_segments
from elastic.driver.ray.journal import RayArchive
from elastic.driver.ray.kv import RetryingKV
from elastic.errors import Invalid
from elastic.protocol.messages import Worker

ROOT = "/hvd-elastic/night/"
OPERATIONS, REQUEST = 128, 1_500_000  # etcd's limits of a transaction
VALUE, VALUES = 1_100_000, 64  # what we put into one value of Ray's store, and ask for at once


class Place(Protocol):
    def archive(self) -> Archive:
        """Start the next driver."""

    def kill(self, journal: Journal) -> None:
        """Kill its driver with SIGKILL."""

    async def tear(self, journal: Journal) -> None:
        """Kill it while it writes one more entry."""

    async def refuses_a_second(self, journal: Journal) -> None:
        """Check that two drivers can't both write it."""

    def contents(self) -> bytes: ...


def large_event() -> Event:
    return WorkerRaised(Worker("h0", 0), 1, None, "ValueError", "line\n" * 400_000)


class InFile:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"

    def archive(self) -> FileArchive:
        return FileArchive(self.path)

    def kill(self, journal: Journal) -> None:
        journal.close()  # as the kernel does

    async def tear(self, journal: Journal) -> None:
        journal.record(1e6, large_event())
        self.kill(journal)
        os.truncate(self.path, self.path.stat().st_size - 100_000)

    async def refuses_a_second(self, journal: Journal) -> None:
        with pytest.raises(Invalid, match=r"process ID (100|200) writes the journal"):
            self.archive()

    def contents(self) -> bytes:
        return self.path.read_bytes()


class InSegments(InFile):
    """A file that continues in a new segment when it has 30 kB and a snapshot is due."""

    def archive(self) -> FileArchive:
        return FileArchive(self.path, SegmentLimits(least=30_000, snapshots=0))

    def contents(self) -> bytes:
        files = [*older_segments(self.path).values(), self.path]
        return b"".join(each.read_bytes() for each in files)


class FakeEtcd:
    """Keys, values and the leader. Transactions are checked against etcd's limits."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.leader: FakeLeader | None = None
        self.transactions = 0

    async def get_prefix(self, prefix: str, *, within_s: float | None = 5.0) -> Listing:
        found = {key: Item(v, 1, 1, 0) for key, v in sorted(self.kept.items()) if key > prefix}
        return Listing(found, 1)


class FakeLeader:
    def __init__(self, etcd: FakeEtcd) -> None:
        self.etcd = etcd
        self.lives_for: int | None = None  # transactions
        etcd.leader = self

    async def transact(self, puts: list[tuple[str, bytes]], deletes: list[str]) -> None:
        await asyncio.sleep(0)
        if self.lives_for is not None:
            self.lives_for -= 1
            if self.lives_for < 0:
                raise asyncio.CancelledError
        if self.etcd.leader is not self:
            raise LeadershipLost("another driver leads")
        keys = [*(key for key, _ in puts), *deletes]
        assert len(keys) < OPERATIONS and len(set(keys)) == len(keys)
        assert sum(len(key) + len(value) for key, value in puts) < REQUEST
        self.etcd.transactions += 1
        self.etcd.kept.update(puts)
        for key in deletes:
            del self.etcd.kept[key]


class InEtcd:
    def __init__(self, folder: Path) -> None:
        self.etcd = FakeEtcd()

    def archive(self) -> EtcdArchive:
        return EtcdArchive(self.etcd, FakeLeader(self.etcd), ROOT)

    def kill(self, journal: Journal) -> None:
        journal.close()

    async def tear(self, journal: Journal) -> None:
        assert self.etcd.leader is not None
        journal.record(1e6, large_event())
        self.etcd.leader.lives_for = 1
        with pytest.raises(asyncio.CancelledError):
            await journal.settle()

    async def refuses_a_second(self, journal: Journal) -> None:
        await self.archive().past()
        journal.record(1e6, large_event())
        before = dict(self.etcd.kept)
        with pytest.raises(LeadershipLost):
            await journal.settle()
        assert self.etcd.kept == before

    def contents(self) -> bytes:
        return b"".join(self.etcd.kept.values())


class Killed(Exception):
    """The driver's process was killed in a call."""


class FakeKeyValues:
    """Ray's store, as one driver sees it. What is kept is shared by all.

    ``troubles`` are those of the next calls: each is called with what would be done, and raises or does it.
    """

    def __init__(self, kept: dict[str, bytes]) -> None:
        self.kept = kept
        self.calls = 0
        self.lives_for: int | None = None  # calls
        self.troubles: list[Callable[[Callable[[], Any]], Any]] = []
        self._alone = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        assert len(value) < VALUE
        self._do(lambda: self.kept.__setitem__(key, value))

    def create(self, key: str, value: bytes) -> bool:
        def change() -> bool:
            new = key not in self.kept
            self.kept.setdefault(key, value)
            return new

        return bool(self._do(change))

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        assert len(keys) <= VALUES
        found: dict[str, bytes] = self._do(
            lambda: {k: self.kept[k] for k in keys if k in self.kept}
        )
        return found

    def keys(self, prefix: str) -> list[str]:
        found: list[str] = self._do(lambda: [key for key in self.kept if key.startswith(prefix)])
        return found

    def remove(self, prefix: str) -> None:
        self._do(lambda: [self.kept.pop(k) for k in list(self.kept) if k.startswith(prefix)])

    def _do(self, change: Callable[[], Any]) -> Any:
        if self.lives_for is not None:
            self.lives_for -= 1
            if self.lives_for < 0:
                raise Killed
        self.calls += 1
        assert self._alone.acquire(blocking=False), "calls are made one at a time"
        try:
            return self.troubles.pop(0)(change) if self.troubles else change()
        finally:
            self._alone.release()


class InRay:
    def __init__(self, folder: Path) -> None:
        self.kept: dict[str, bytes] = {}
        self.latest = FakeKeyValues(self.kept)

    def archive(self) -> RayArchive:
        self.latest = FakeKeyValues(self.kept)
        return RayArchive("night", kv=RetryingKV(self.latest, lambda level, text: None))

    def kill(self, journal: Journal) -> None:
        journal.close()

    async def tear(self, journal: Journal) -> None:
        journal.record(1e6, large_event())
        self.latest.lives_for = 1
        with pytest.raises(Killed):
            await journal.settle()

    async def refuses_a_second(self, journal: Journal) -> None:
        await self.archive().past()
        journal.record(0.0, TimePassed())  # which has no actions
        # After it was written: `test_journal_ray` tells what becomes of it.
        with pytest.raises(LeadershipLost):
            await journal.settle()
        before = dict(self.kept)
        with pytest.raises(LeadershipLost):
            await journal.settle()
        assert self.kept == before

    def contents(self) -> bytes:
        return b"".join(self.kept.values())


class MemoryJournal(Journal):
    """The fake: the lines of a file, in a list."""

    def __init__(
        self, place: InMemory, policy: SnapshotPolicy | None, entries: int, writer: Writer
    ) -> None:
        super().__init__(policy, entries=entries)
        self._place = place
        self._writer = writer

    def _keep(self, entry: Entry) -> int:
        self._place.lines.append(encoded(entry))
        return len(self._place.lines[-1])

    def keep_snapshot(self, data: bytes, at: float) -> None:
        self._place.lines = [encoded(Snapshot(msgspec.Raw(data), at, self._writer))]

    def close(self) -> None:
        self._place.locked = False


class InMemory:
    """Its archive is itself."""

    def __init__(self, folder: Path) -> None:
        self.header: Header | None = None
        self.lines: list[bytes] = []
        self.locked = False

    def archive(self) -> InMemory:
        if self.locked:
            raise Invalid("another driver writes this journal")
        self.locked = True
        return self

    async def past(self) -> RecoveredJob | None:
        return past_of(self.header, [line[:-1] for line in self.lines]) if self.header else None

    async def begin(self, header: Header, policy: SnapshotPolicy | None = None) -> MemoryJournal:
        self.header, self.lines = header, []
        return MemoryJournal(self, policy, 0, header.writer)

    async def go_on(
        self, past: RecoveredJob, writer: Writer, policy: SnapshotPolicy | None = None
    ) -> MemoryJournal:
        self.lines.append(encoded(Resumed(writer)))
        return MemoryJournal(self, policy, past.replayed, writer)

    def close(self) -> None:
        self.locked = False

    def kill(self, journal: Journal) -> None:
        self.locked = False

    async def tear(self, journal: Journal) -> None:
        self.locked = False

    async def refuses_a_second(self, journal: Journal) -> None:
        with pytest.raises(Invalid):
            self.archive()

    def contents(self) -> bytes:
        return b"".join([encoded(self.header) if self.header else b"", *self.lines])


PLACES: Iterable[Any] = (InFile, InSegments, InEtcd, InRay, InMemory)
