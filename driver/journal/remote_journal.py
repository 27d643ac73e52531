"""Base class of journals that write records in pieces to a remote store. Makes no decisions.

Entries that are recorded while a record is being written are combined in the next record. A snapshot is a separate
record that invalidates all earlier records.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

import msgspec

from elastic.driver.journal.entries import Entry, Snapshot, Writer, digest_of, encoded
from elastic.driver.journal.journal import Journal, SnapshotPolicy
from elastic.driver.journal.record_pieces import PendingRecord

R = TypeVar("R", bound=PendingRecord)


class RecordJournal(Journal, Generic[R]):
    """Open journal in a remote store.

    Writes wait until the store responds or another driver leads the job.
    """

    def __init__(
        self, make: type[R], writer: Writer, policy: SnapshotPolicy | None, *, entries: int = 0
    ) -> None:
        super().__init__(policy, entries=entries)
        self._make = make
        self.writer = writer
        self.waiting: deque[R] = deque()
        self._settling = asyncio.Lock()

    async def settle(self) -> None:
        """Wait until all recorded entries are in the store.

        Raises:
            LeadershipLost: another driver leads, so the actions of the entries must not be performed.
        """
        async with self._settling:
            while self.waiting:
                await self._put(self.waiting[0])
                self.waiting.popleft()

    async def _put(self, record: R) -> None:
        raise NotImplementedError

    def _keep(self, entry: Entry) -> int:
        digest = digest_of(entry.actions)
        line = encoded(Entry(entry.at, entry.event, [], entry.error, digest, entry.more))
        if not (self.waiting and self.waiting[-1].takes(line)):
            self.waiting.append(self._make(bytearray()))
        self.waiting[-1].data += line
        return len(line)

    def keep_snapshot(self, data: bytes, at: float) -> None:
        line = encoded(Snapshot(msgspec.Raw(data), at, self.writer))
        self.waiting.append(self._make(bytearray(self._before_snapshot() + line), begins=True))

    def _before_snapshot(self) -> bytes:
        """Return the bytes that precede each snapshot in its record."""
        return b""
