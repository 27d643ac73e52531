"""Local copy of a journal in a remote store, for users and invariant checks. Makes no decisions.

The copy begins with the entries of this driver. The next driver resumes from the original.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.driver.journal.entries import Entry, Header
from elastic.driver.journal.file_journal import FileArchive, FileJournal
from elastic.driver.journal.journal import RING, Journal, SnapshotPolicy
from elastic.driver.reasons import Reason


async def copied_to(
    file: FileArchive, header: Header, state: bytes | None, at: float, policy: SnapshotPolicy
) -> FileJournal:
    """Create a local copy without entries, to which the journal's entries will be written.

    Args:
        file: the file to write.
        header: header of the journal.
        state: snapshot of the state at the end of the previous driver, or None if this is the first driver.
        at: time of the snapshot, in seconds.
        policy: policy of the journal. The copy takes a snapshot only when it begins a new segment.

    Raises:
        Invalid: the file contains something other than a journal.
    """
    await file.past()
    copy = await file.begin(header, replace(policy, resumable=False))
    if state is not None:
        copy.keep_snapshot(state, at)
    return copy


class JournalCopy(Journal):
    """Journal that writes each entry to two journals: the authoritative ``first``, and ``copy`` for readers."""

    def __init__(self, first: Journal, copy: FileJournal) -> None:
        super().__init__()
        self._first = first
        self._copy = copy

    def append(self, entry: Entry) -> None:
        self._first.append(entry)
        self._copy.append(entry)

    def trouble(self, at: float, reason: Reason) -> None:
        self._copy.trouble(at, reason)

    async def settle(self) -> None:
        await self._first.settle()
        await self._copy.settle()

    async def rest(self) -> None:
        await self._first.rest()
        await self._copy.rest()

    def story(self, last: int = RING) -> str:
        return self._first.story(last)

    def close(self) -> None:
        self._first.close()
        self._copy.close()
