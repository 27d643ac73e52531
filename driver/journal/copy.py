"""A readable copy of a journal that is kept elsewhere: in a file here, from where this driver begins. Decides nothing.

What counts for the next driver is the one that is copied. This one is for people, and for checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.driver.events import Action, Event
from elastic.driver.journal.entries import Header
from elastic.driver.journal.file import FileArchive, FileJournal
from elastic.driver.journal.journal import RING, Journal, SnapshotPolicy
from elastic.driver.reasons import Reason


async def copied_to(
    file: FileArchive,
    header: Header,
    state: bytes | None,
    at: float,
    *,
    failed: Callable[[str], None],
) -> FileJournal:
    """An empty copy. ``state``: a snapshot of what the driver before this one has left, taken ``at``; None: nothing.

    Raises Invalid if the file holds something else than a journal.
    """
    await file.past()
    copy = await file.begin(header, SnapshotPolicy(failed=failed))
    if state is not None:
        copy.keep_snapshot(state, at)
    return copy


class Copied(Journal):
    """Two journals as one. ``first`` counts, ``copy`` follows."""

    def __init__(self, first: Journal, copy: FileJournal) -> None:
        super().__init__()
        self._first = first
        self._copy = copy

    def record(
        self, at: float, event: Event, actions: Sequence[Action] = (), *, error: str = ""
    ) -> None:
        self._first.record(at, event, actions, error=error)
        self._copy.record(at, event, actions, error=error)

    def trouble(self, at: float, reason: Reason) -> None:
        self._copy.trouble(at, reason)

    async def settle(self) -> None:
        await self._first.settle()

    async def rest(self) -> None:
        await self._first.rest()

    def story(self, last: int = RING) -> str:
        return self._first.story(last)

    def close(self) -> None:
        self._first.close()
        self._copy.close()
