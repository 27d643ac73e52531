"""Reader of job journals, including incomplete and damaged files. Performs I/O.

A file that is not a journal is rejected with an error. A journal is read as far as possible, even if its last line is
incomplete, some lines are invalid, its format is older, its older segments were deleted, or it is still being written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from elastic.driver.events import Action
from elastic.driver.journal import entries
from elastic.driver.journal.segment_files import opened_older
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import restore_snapshot
from elastic.driver.monitoring.explain.findings import JournalState
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.timeline_rows import WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.settings import Settings
from elastic.errors import Invalid

_HINTS = {
    errno.ENOENT: ": pass the file of --journal, or the name of a running job",
    errno.EACCES: "; it belongs to the user that started the job, so explain it as that user",
}
# Maximum length of a line, in bytes. A snapshot of a job with 100,000 workers takes about 13 MB, or 50 MB in earlier
# versions.
LINE_LIMIT = 256 << 20
NO_JOURNAL = 100  # number of invalid lines at the beginning of a file after which it is rejected


@dataclass
class JournalReading:
    """Result of reading a journal as far as possible.

    Args:
        offset: seconds to add to the journal's times to obtain seconds since 1970. None in old journals.
    """

    header: entries.Header
    settings: Settings | None
    offset: float | None
    view: JobView = field(default_factory=JobView)
    story: JobHistory = field(init=False)
    rows: WorkerRows = field(init=False)
    source: JournalState = field(default_factory=JournalState)

    def __post_init__(self) -> None:
        self.story = JobHistory(TimeSpent(self.view), self.header.begins)
        self.rows = WorkerRows(self.view)


def read_journal(path: Path) -> JournalReading:
    """Read a journal to its end.

    Raises:
        Invalid: the file cannot be read or is not a journal.
    """
    with JournalEntries(path) as found:
        for _ in found:
            pass
        return found.reading


class JournalEntries:
    """Context manager and iterator over the entries of a journal and their actions.

    If an archived journal omits the actions, they are recomputed. ``reading`` contains the data read so far.

    Raises:
        Invalid: the file cannot be read or is not a journal. Raised before the first entry is returned.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _opened(path)
        try:
            self._runs = _is_written(self._file)
            header, settings = _header(path, self._file.readline(LINE_LIMIT))
        except BaseException:
            self._file.close()
            raise
        self._older = opened_older(path, header)
        self.reading = JournalReading(header, settings, _offset(header.writer))
        self._membership: Membership | None = None  # recomputes omitted actions
        self._read = self._left_out = 0
        self._torn = self._middle = False
        self._earlier_s: float | None = None

    def __enter__(self) -> JournalEntries:
        return self

    def __exit__(self, *error: object) -> None:
        for file in [*self._older, self._file]:
            file.close()

    def __iter__(self) -> Iterator[entries.Entry]:
        last_at = self.reading.header.writer.at
        first = True
        for text in self._lines():
            match self._decoded(text):
                case entries.Entry() as entry:
                    last_at = entry.at
                    self._note(entry)
                    yield entry
                case entries.Snapshot() as snapshot if first:
                    self._begin_from(snapshot)
                case entries.Resumed(writer) if writer.unix_s:
                    self.reading.offset = _offset(writer)
                case entries.TroubleLine(reason, at):
                    self.reading.story.trouble(reason, max(at, last_at))
                case _:
                    pass
            first = False
        self._summed_up()

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of all segments without their headers, and without an incomplete last line."""
        for file in [*self._older, self._file]:
            while text := file.readline(LINE_LIMIT):
                if not text.endswith(b"\n"):
                    self._torn = True
                    break
                yield text

    def _decoded(self, text: bytes) -> entries.Line | None:
        try:
            return entries.decoded(text)
        except (msgspec.MsgspecError, UnicodeError, TypeError, LookupError, ValueError):
            self._left_out += 1
            if self._left_out >= NO_JOURNAL and not self._read:
                raise Invalid(
                    f"{str(self._path)!r} is not a journal: its lines are not journal entries. Pass the file that"
                    " --journal specified"
                ) from None
            return None

    def _note(self, entry: entries.Entry) -> None:
        self._read += 1
        settings, story = self.reading.settings, self.reading.story
        if entry.digest is not None and settings is not None:
            self._membership = self._membership or Membership(settings)
            entry.actions = _again(self._membership, entry)
        if entry.error:
            story.bug(entry.error)
        self.reading.view.note(entry.event, entry.actions, entry.at)

    def _begin_from(self, snapshot: entries.Snapshot) -> None:
        """Initialize from a snapshot, because the journal begins in the middle of a job."""
        header, settings = self.reading.header, self.reading.settings
        self._middle = True
        if snapshot.writer.unix_s:
            self.reading.offset = _offset(snapshot.writer)
        if header.segment > 1 and header.writer.unix_s:
            self._earlier_s = max(0.0, snapshot.at - header.writer.at)
        membership = None if settings is None else _restored(bytes(snapshot.snapshot), settings)
        if membership is None:
            return
        self._membership = membership
        places = ((worker, membership.place_of(worker)) for worker in membership.members)
        members = {worker: (0, place.rank) for worker, place in places if place is not None}
        self.reading.view.adopt(
            members, membership.generation, snapshot.at, prepares=membership.prepares
        )

    def _summed_up(self) -> None:
        reading = self.reading
        reading.source = JournalState(
            reading.settings,
            False if reading.story.view.end is not None else self._runs,
            abandoned=reading.header.journal == entries.ABANDONED,
            outlives=reading.header.outlives,
            left_out=self._left_out,
            torn=self._torn,
            from_the_middle=self._middle,
            earlier_s=self._earlier_s,
        )


def _opened(path: Path) -> BinaryIO:
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise Invalid(
                f"{str(path)!r} is a folder: pass the journal file that --journal specified"
            )
        return open(path, "rb")
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise Invalid(f"the journal {str(path)!r} can't be read: {error.strerror}{hint}") from error


def _is_written(file: BinaryIO) -> bool | None:
    """Return whether a driver holds the lock on the file. Return None if the file system does not support locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None


def _header(path: Path, line: bytes) -> tuple[entries.Header, Settings | None]:
    if not line:
        raise Invalid(
            f"the journal {str(path)!r} is empty, because its driver exited before the first write: there is"
            " nothing to explain; see the output of that elasticrun"
        )
    try:
        header = entries.decoded_header(line)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Invalid(
            f"{str(path)!r} is not a journal of elasticrun: {error}. Pass the file that --journal specified"
        ) from error
    if header.journal not in (entries.FORMAT, entries.ABANDONED):
        raise Invalid(
            f"the journal {str(path)!r} has format {header.journal}, which this version can't read: run explain"
            " with the version that wrote the journal"
        )
    try:
        return header, Settings(**header.settings)
    except (TypeError, Invalid):
        # Another version wrote the journal, but its events can still be reported.
        return header, None


def _offset(writer: entries.Writer) -> float | None:
    return writer.unix_s - writer.at if writer.unix_s else None


def _again(membership: Membership, entry: entries.Entry) -> list[Action]:
    try:
        return membership.handle(entry.event, entry.at, more=entry.more)
    # The exception may come from a bug in that version, which the entry may report, or from lines skipped earlier.
    except Exception:
        return []


def _restored(data: bytes, settings: Settings) -> Membership | None:
    try:
        return restore_snapshot(data, settings)
    except Invalid:
        return None
