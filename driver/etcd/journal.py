"""Journal of a job in etcd, from which a replacement driver restores the job's state. Makes no decisions.

    journal/header          {"begins": N, "header": {...}}: the records from number N on are valid
    journal/000000000017    1/1, followed by the lines of one record, as in a journal file

A record is a batch of entries, a snapshot, or a takeover. A record that exceeds etcd's limit is split into pieces with
their own numbers, and is valid once the last piece exists. Actions are omitted, since they can be recomputed from the
events. A digest shows whether another driver computes the same actions. Transactions succeed only while this driver
leads, so a driver that was replaced can neither write nor act, because actions require a written record.

A snapshot changes N in one transaction, so that it is either completely valid or has no effect. Records before N are
deleted in this and later transactions, because etcd limits the number of operations in a transaction.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec

from elastic.driver.journal.entries import Header, Resumed, Writer, encoded
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.journal.record_pieces import PendingRecord
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.remote_journal import RecordJournal
from elastic.driver.journal.resume import past_of
from elastic.errors import Invalid

if TYPE_CHECKING:
    from elastic.driver.etcd.client import Listing

DELETES = 100  # Maximum number of deletions in one transaction. etcd accepts 128 operations.
_NUMBER = re.compile(r"\d{12}")


class Leader(Protocol):
    """Interface of `elastic.driver.etcd.leader_election.Leadership` for writes that only a leader may perform."""

    async def transact(self, puts: list[tuple[str, bytes]], deletes: list[str]) -> None: ...


class Readable(Protocol):
    async def get_prefix(self, prefix: str, *, within_s: float | None = ...) -> Listing: ...


class _Beginning(msgspec.Struct):
    begins: int
    header: Header


_encode = msgspec.json.Encoder().encode


class EtcdArchive:
    """Journal under the prefix ``root``, which ends in the job's name and a slash. ``leader`` must already lead."""

    def __init__(self, etcd: Readable, leader: Leader, root: str) -> None:
        self._etcd = etcd
        self._leader = leader
        self._folder = f"{root}journal/"
        self._next: int | None = None  # number of the next record, or None if unknown
        # numbers of the records before the first valid record, which must be deleted
        self._obsolete: list[int] = []
        self._counting: list[int] = []

    async def past(self) -> RecoveredJob | None:
        """Return the job to resume, or None. Waits until etcd is available.

        Raises:
            Invalid: the journal is corrupted.
        """
        listing = await self._etcd.get_prefix(self._folder, within_s=None)
        kept = {key.removeprefix(self._folder): item.value for key, item in listing.items.items()}
        beginning = kept.pop("header", None)
        numbers = {
            int(name): data for name, data in sorted(kept.items()) if _NUMBER.fullmatch(name)
        }
        self._next = max(numbers, default=-1) + 1
        self._obsolete, self._counting = [*numbers], []
        if beginning is None:
            return None
        try:
            found = msgspec.json.decode(beginning, type=_Beginning)
            self._next = max(self._next, found.begins)
            self._obsolete = [number for number in numbers if number < found.begins]
            self._counting = [number for number in numbers if number >= found.begins]
            lines = b"".join(_records(numbers, found.begins)).split(b"\n")[:-1]
            return past_of(found.header, lines)
        except (msgspec.MsgspecError, ValueError) as error:
            where = f"the journal in etcd under {self._folder}"
            raise Invalid(
                f"{where} can't be resumed: {error}. Restore it from a backup of etcd, or pass --fresh to start a new"
                " job"
            ) from error

    async def begin(self, header: Header, policy: SnapshotPolicy | None = None) -> EtcdJournal:
        if self._next is None:
            raise RuntimeError("the journal has not been read from etcd yet: call past() first")
        journal = EtcdJournal(self._leader, self._folder, header, header.writer, policy)
        await journal.replace([*self._obsolete, *self._counting], self._next)
        return journal

    async def go_on(
        self, past: RecoveredJob, writer: Writer, policy: SnapshotPolicy | None = None
    ) -> EtcdJournal:
        if self._next is None:
            raise RuntimeError("the journal has not been read from etcd yet: call past() first")
        journal = EtcdJournal(
            self._leader, self._folder, past.header, writer, policy, entries=past.replayed
        )
        await journal.go_on(self._obsolete, self._counting, self._next)
        return journal

    async def clear(self) -> None:
        """Delete the journal. No driver can resume from it afterwards."""
        left = [f"{self._folder}header"] + [
            f"{self._folder}{number:012}" for number in [*self._obsolete, *self._counting]
        ]
        while left:
            await self._leader.transact([], left[:DELETES])
            left = left[DELETES:]

    def close(self) -> None:
        """No-op, because the archive holds no resources."""


class EtcdJournal(RecordJournal[PendingRecord]):
    """Journal in etcd that is open for writing."""

    def __init__(
        self,
        leader: Leader,
        folder: str,
        header: Header,
        writer: Writer,
        policy: SnapshotPolicy | None,
        *,
        entries: int = 0,
    ) -> None:
        super().__init__(PendingRecord, writer, policy, entries=entries)
        self._leader = leader
        self._folder = folder
        self._header = header
        self._next = 0  # number of the next piece
        self._counting: list[int] = []  # numbers of the valid pieces
        # numbers of the obsolete pieces that were not deleted yet
        self._obsolete: deque[int] = deque()

    async def replace(self, obsolete: Iterable[int], number: int) -> None:
        """Replace the journal with that of a new job. Its first piece gets the number ``number``."""
        self._next = number
        self._obsolete.extend(obsolete)
        await self._transact([self._beginning(number)])

    async def go_on(self, obsolete: Iterable[int], counting: Iterable[int], number: int) -> None:
        """Continue the journal of a resumed job. Its next piece gets the number ``number``."""
        self._next = number
        self._obsolete.extend(obsolete)
        self._counting = list(counting)
        self.waiting.append(PendingRecord(bytearray(encoded(Resumed(self.writer)))))
        await self.settle()

    async def _put(self, record: PendingRecord) -> None:
        """Write a record piece by piece. An unacknowledged piece is written again under the same key."""
        record.begun = True
        count = record.pieces
        while record.written < count:
            piece = b"%d/%d\n" % (record.written + 1, count) + record.next_piece()
            puts = [(self._key(self._next), piece)]
            first = self._next - record.written
            if record.begins and record.written + 1 == count:
                puts.append(self._beginning(first))
                self._obsolete.extend(n for n in self._counting if n < first)
                self._counting = [n for n in self._counting if n >= first]
            await self._transact(puts)
            self._counting.append(self._next)
            self._next += 1
            record.written += 1

    async def _transact(self, puts: list[tuple[str, bytes]]) -> None:
        deleted = list(islice(self._obsolete, DELETES))
        await self._leader.transact(puts, [self._key(number) for number in deleted])
        for _ in deleted:
            self._obsolete.popleft()

    def _beginning(self, number: int) -> tuple[str, bytes]:
        return f"{self._folder}header", _encode(_Beginning(number, self._header))

    def _key(self, number: int) -> str:
        return f"{self._folder}{number:012d}"


def _records(numbers: Mapping[int, bytes], begins: int) -> Iterator[bytes]:
    pieces: list[bytes] = []
    for expected, number in enumerate((n for n in numbers if n >= begins), start=begins):
        if number != expected:
            raise ValueError(f"record {expected} of the journal is missing")
        head, _, body = numbers[number].partition(b"\n")
        index, count = map(int, head.split(b"/"))
        if index == 1:
            pieces = []  # discard an incomplete record: its driver exited while writing it
        if index == len(pieces) + 1:
            pieces.append(body)
            if index == count:
                yield b"".join(pieces)
                pieces = []
