"""What journals have in common that write records to a store elsewhere, in pieces. Decides nothing.

Entries that come while one is being written travel together in the next. A snapshot is a record of its own, with which
nothing before it counts any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

import msgspec

from elastic.driver.journal.entries import Entry, Snapshot, Writer, digest_of, encoded
from elastic.driver.journal.journal import Journal, SnapshotPolicy
from elastic.driver.journal.records import PendingRecord

R = TypeVar("R", bound=PendingRecord)


class RecordJournal(Journal, Generic[R]):
    """An open journal. It can't fail: it waits for its store, or another driver leads and writes its own."""

    def __init__(
        self, make: type[R], writer: Writer, policy: SnapshotPolicy | None, *, entries: int = 0
    ) -> None:
        super().__init__(policy, entries=entries)
        self._make = make
        self.writer = writer
        self.waiting: deque[R] = deque()
        self._settling = asyncio.Lock()

    async def settle(self) -> None:
        """What was recorded is in the store. Raises Deposed if another driver leads: nothing may be done about it."""
        async with self._settling:
            while self.waiting:
                await self._put(self.waiting[0])
                self.waiting.popleft()

    async def _put(self, record: R) -> None:
        """All its pieces. Those that are written already are not written again."""
        raise NotImplementedError

    def _keep(self, entry: Entry) -> int:
        digest = digest_of(entry.actions)
        line = encoded(Entry(entry.at, entry.event, [], entry.error, digest))
        if not (self.waiting and self.waiting[-1].takes(line)):
            self.waiting.append(self._make(bytearray()))
        self.waiting[-1].data += line
        return len(line)

    def keep_snapshot(self, data: bytes, at: float) -> None:
        line = encoded(Snapshot(msgspec.Raw(data), at, self.writer))
        self.waiting.append(self._make(bytearray(self._before_snapshot() + line), begins=True))

    def _before_snapshot(self) -> bytes:
        """What stands before each in its record."""
        return b""
