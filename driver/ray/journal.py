"""Journal of a job in Ray's key-value store, and the recovery of the job state. Makes no decisions.

    journal/<job>/writers/000002                            the ID of the driver that has the second turn
    journal/<job>/records/000002-000001-<id>/000000017      {"piece":1,"of":1}, followed by the lines of one record

A record is a batch of entries, a snapshot preceded by the header, or a takeover. A large record is split into numbered
pieces, and is valid once the last piece exists. A driver writes chapters, numbered from 000000. Each snapshot begins a
new chapter, and the earlier chapters are then removed. The first record of a driver that resumes a job states which
record of which chapter it continues. Actions are omitted. A digest shows whether recomputed actions are equal to the
original ones.

The store has no transactions, so it cannot reject writes of a deposed driver. Readers ignore them instead:

- A driver takes a turn by creating a key that does not exist yet. Turns are numbered, each belongs to one driver, and
  no two drivers write the same key. A driver reads the store after taking its turn.
- After writing a record, a driver checks that the turn is still its own and that the next turn is not taken. If so, any
  later driver will read the record, and the decisions in it may be carried out. If not, LeadershipLost is raised.
- Valid records are found by reading backwards, from the last turn with a record to the start of a chapter. Records that
  were written too late are ignored, and records before that start are not needed. Any driver may remove them.

The store is as durable as the head process of the cluster: without Redis, it is lost with that process.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable

import msgspec

from elastic.driver.discovery.interface import Log
from elastic.driver.etcd.keys import ROOT, job_root
from elastic.driver.etcd.leader_election import LeadershipLost
from elastic.driver.journal.entries import Header, Resumed, Writer, decoded_header, encoded
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.remote_journal import RecordJournal
from elastic.driver.journal.resume import past_of
from elastic.driver.journal.writer_chapters import (
    Place,
    SegmentedRecord,
    chapter_name,
    counting,
    writer_of,
)
from elastic.driver.network.blocking_calls import within
from elastic.driver.ray.kv import KVStore, RetryingKV
from elastic.errors import Invalid

READ = 32  # number of values read by one call
FORGET_S = 10.0


class RayArchive:
    """Archive with the journal of one job in Ray's key-value store.

    ``lost`` is set when another driver writes the journal, or when the store has lost the journal.

    Before this driver reads the store, it takes the next turn. The previous driver can then no longer write valid
    records.
    """

    def __init__(
        self, job: str, *, log: Log = lambda level, text: None, kv: RetryingKV | None = None
    ) -> None:
        """Create the archive. Does not access the store.

        Raises:
            Invalid: the name of the job is invalid, or Ray is not installed.
        """
        self._job = job
        self._root = f"journal/{job_root(job).removeprefix(ROOT)}"
        self._log = log
        self._kv = kv or RetryingKV(_ray(), log)
        self._turn: WriterTerm | None = None
        self._chapters: list[str] = []  # names of all existing chapters
        # end of the last valid record, where this driver continues
        self._place: Place | None = None
        self.lost = asyncio.Event()

    async def past(self) -> RecoveredJob | None:
        """Read the journal. Return the job to resume, or None. Waits until Ray responds.

        Raises:
            Invalid: the journal is corrupted.
            LeadershipLost: another driver became the writer of the journal meanwhile.
        """
        self._turn = self._turn or await self._take()
        writers = await self._writers()
        chapters = await self._read()
        # Ensure that no other driver has removed records during the read.
        await self._turn.check()
        self._chapters, self._place = sorted(chapters), None
        # A record whose turn is missing was written late, by a driver of an earlier job.
        known = {name: pieces for name, pieces in chapters.items() if writer_of(name) in writers}
        try:
            found, self._place = counting(known)
            if not found:
                return None
            first, *lines = b"".join(found).split(b"\n")[:-1]
            return past_of(decoded_header(first), lines)
        except (msgspec.MsgspecError, ValueError) as error:
            where = f"the journal in Ray's key-value store under {self._root}"
            raise Invalid(
                f"{where} can't be resumed: {error}. Start the job under another name"
            ) from error

    async def begin(self, header: Header, policy: SnapshotPolicy | None = None) -> RayJournal:
        if self._turn is None:
            raise RuntimeError("the store has not been read yet: call past() before begin()")
        journal = RayJournal(self._turn, self._chapters, header, header.writer, policy)
        await journal.begin()
        return journal

    async def go_on(
        self, past: RecoveredJob, writer: Writer, policy: SnapshotPolicy | None = None
    ) -> RayJournal:
        if self._turn is None or self._place is None:
            raise RuntimeError(
                "the store was empty at the last read, so no job can be resumed: call begin()"
            )
        journal = RayJournal(
            self._turn, self._chapters, past.header, writer, policy, entries=past.replayed
        )
        await journal.go_on(self._place)
        return journal

    async def forget(self, within_s: float = FORGET_S) -> None:
        """Remove the journal of a job after its outcome has been read.

        Only the driver that writes the journal may call this method. Keys that cannot be removed in time remain.

        Raises:
            LeadershipLost: another driver writes the journal.
        """
        try:
            await within(self._forget(), within_s)
        except asyncio.TimeoutError:
            self._log(
                "warning",
                f"the journal of job {self._job} remains in Ray's key-value store, which did not answer",
            )

    def close(self) -> None:
        """Do nothing, because the archive holds no resources."""

    async def _forget(self) -> None:
        if self._turn is not None:
            await self._turn.check()
        # Remove the turns first, because records are valid only with their turns. Otherwise, the rest of the journal
        # could be mistaken for a complete one.
        await self._kv.remove(f"{self._root}writers/")
        await self._kv.remove(f"{self._root}records/")
        self._turn = None

    async def _take(self) -> WriterTerm:
        own = uuid.uuid4().hex[:12]
        while True:
            number = max((number for number, _ in await self._writers()), default=0) + 1
            turn = WriterTerm(self._kv, self._job, self._root, number, own, self.lost, self._log)
            if await turn.take():
                return turn

    async def _writers(self) -> set[tuple[int, str]]:
        prefix = f"{self._root}writers/"
        found = await self._kv.get(await self._kv.keys(prefix))
        return {(int(key.removeprefix(prefix)), value.decode()) for key, value in found.items()}

    async def _read(self) -> dict[str, dict[int, bytes]]:
        prefix = f"{self._root}records/"
        keys = sorted(await self._kv.keys(prefix))
        chapters: dict[str, dict[int, bytes]] = {}
        for start in range(0, len(keys), READ):
            for key, value in (await self._kv.get(keys[start : start + READ])).items():
                chapter, _, number = key.removeprefix(prefix).partition("/")
                chapters.setdefault(chapter, {})[int(number)] = value
        return chapters


class WriterTerm:
    """Turn of one driver as the writer of a journal.

    Args:
        number: number of the turn, which is greater than those of all earlier turns.
    """

    def __init__(
        self,
        kv: RetryingKV,
        job: str,
        root: str,
        number: int,
        own: str,
        lost: asyncio.Event,
        log: Log,
    ) -> None:
        self.number = number
        self._kv = kv
        self._job = job
        self._records = f"{root}records/"
        self._key = f"{root}writers/{number:06d}"
        self._next = f"{root}writers/{number + 1:06d}"
        self._own = own
        self._lost = lost
        self._log = log

    async def take(self) -> bool:
        """Take the turn. Return whether this driver has it.

        The result is also True if an earlier attempt succeeded but its answer was lost.
        """
        if await self._kv.create(self._key, self._own.encode()):
            return True
        return (await self._kv.get([self._key])).get(self._key) == self._own.encode()

    async def check(self) -> None:
        """Raise LeadershipLost if another driver has taken the turn."""
        if not self._lost.is_set():
            found = await self._kv.get([self._key, self._next])
            if found == {self._key: self._own.encode()}:
                return
            self._lost.set()
            self._log(
                "warning",
                f"another driver leads job {self._job} now, or Ray's key-value store lost its data; this driver"
                " exits",
            )
        raise LeadershipLost(
            f"this driver no longer leads job {self._job}, so the write was rejected: see the log of the new driver"
        )

    def chapter(self, number: int) -> str:
        """Return the name of this driver's chapter with the given number. Names sort in the order of the chapters."""
        return chapter_name(self.number, number, self._own)

    async def put(self, place: Place, data: bytes) -> None:
        """Write a piece of a record. The call may be repeated.

        If the piece is invalid because another driver has taken over, a later `check` raises LeadershipLost.

        Raises:
            LeadershipLost: another driver is known to have taken the turn.
        """
        if self._lost.is_set():
            await self.check()
        await self._kv.put(f"{self._records}{place.chapter}/{place.end:09d}", data)

    async def remove(self, chapter: str) -> None:
        await self._kv.remove(f"{self._records}{chapter}/")


class RayJournal(RecordJournal[SegmentedRecord]):
    """Journal in Ray's key-value store, open for writing."""

    def __init__(
        self,
        turn: WriterTerm,
        obsolete: Iterable[str],
        header: Header,
        writer: Writer,
        policy: SnapshotPolicy | None,
        *,
        entries: int = 0,
    ) -> None:
        super().__init__(SegmentedRecord, writer, policy, entries=entries)
        self._turn = turn
        # chapters that are removed after the next chapter has begun
        self._obsolete = deque(obsolete)
        self._header = header
        self._chapter = 0
        self._place = Place(turn.chapter(0), 0)  # position at which the next piece is written

    async def begin(self) -> None:
        """Begin the journal of a new job."""
        self.waiting.append(SegmentedRecord(bytearray(encoded(self._header)), begins=True))
        await self.settle()

    async def go_on(self, after: Place) -> None:
        """Continue the journal of a resumed job."""
        self.waiting.append(SegmentedRecord(bytearray(encoded(Resumed(self.writer))), after=after))
        await self.settle()

    def _before_snapshot(self) -> bytes:
        return encoded(self._header)

    async def _put(self, record: SegmentedRecord) -> None:
        """Write a record piece by piece. If a piece is not acknowledged, it is written again under the same key."""
        if not record.begun and record.begins and self._place.end:
            self._obsolete.append(self._place.chapter)
            self._chapter += 1
            self._place = Place(self._turn.chapter(self._chapter), 0)
        record.begun = True
        while (piece := record.piece()) is not None:
            await self._turn.put(self._place, piece)
            self._place = Place(self._place.chapter, self._place.end + 1)
            record.written += 1
        await self._turn.check()
        if record.begins and self._obsolete:
            while self._obsolete:
                await self._turn.remove(self._obsolete[0])
                self._obsolete.popleft()
            # The removal may have taken a long time, so check the turn again.
            await self._turn.check()


def _ray() -> KVStore:
    try:
        from elastic.driver.ray.kv_calls import RayKV
    except ImportError as error:
        raise Invalid(
            f"Ray can't be used, because the package {error.name} is not installed: run pip install 'hvd-elastic[ray]'"
        ) from None
    return RayKV()
