"""Journal of a job in a file, from which a replacement driver restores the job's state. Makes no decisions.

Each entry is in the file when `settle` returns, so that the next driver finds it even if this driver is killed. An
entry is written when it is recorded, unless another event is already queued (`Entry.more`). It is then written together
with the entry of that event. Entries are not synced to disk: a power failure may lose the latest entries, but it also
ends the workers on the machine. A lock on the file prevents a second driver from writing while the first one runs.

A journal that has reached a size limit continues in a new segment, which begins with a snapshot and replaces the file.
See `segment_files` for the older segments, and `rotation` for the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

from elastic.driver.journal.entries import (
    ABANDONED,
    BEGINNING,
    SNAPSHOT,
    Entry,
    Header,
    Line,
    Resumed,
    Snapshot,
    TroubleLine,
    Writer,
    decoded,
    decoded_header,
    encoded,
    header_of,
)
from elastic.driver.journal.journal import Journal, SnapshotPolicy
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.resume import past_of, writer_here
from elastic.driver.journal.rotation import SegmentLimits
from elastic.driver.journal.segment_files import (
    check_beginning,
    has_journal,
    journal_of_segment,
    keep_segment,
    move_older,
    next_path,
    prune,
    remove_older,
    remove_unfinished,
)
from elastic.driver.network.blocking_calls import to_thread
from elastic.driver.reasons import Reason
from elastic.driver.settings import Settings
from elastic.errors import Invalid

KEPT = 5  # maximum number of earlier jobs whose journals are kept
TOGETHER = 1000  # maximum number of entries that are written with a later one
BLOCK = 1 << 20  # bytes per read in the search for the last snapshot
LIMITS = SegmentLimits()
SYNC_S = 30.0  # timeout in seconds for the storage to sync a segment, or to delete old ones
OPENED = 5  # maximum number of attempts to open a file that another driver replaces
_LACKING = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FileArchive:
    """Journal file that stays locked while this object exists."""

    def __init__(self, path: Path, limits: SegmentLimits | None = None) -> None:
        """Open and lock the journal file.

        Args:
            path: the journal.
            limits: limits of its segments. None means LIMITS.

        Raises:
            Invalid: the file cannot be written, or another driver writes it.
        """
        self.path = path
        self.limits = limits or LIMITS
        self._end = 0  # offset of the end of the last complete line
        self.fd = _opened_and_locked(path)
        # whether it is a regular file rather than a device or a pipe
        self.regular = stat.S_ISREG(os.fstat(self.fd).st_mode)

    async def past(self) -> RecoveredJob | None:
        """Return the job to resume, or None. Reads only the header and the part from the last snapshot on.

        Raises:
            Invalid: the file cannot be read or is not a journal.
        """
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                end = _last(file.fileno(), b"\n", size) + 1
                self._end = end
                file.seek(0)
                first = file.readline()
                check_beginning(self.path, first)
                if not end:
                    return None  # the file is empty, or its header is incomplete
                start = _last(file.fileno(), b"\n" + SNAPSHOT, end - 1) + 1 or len(first)
                file.seek(start)
                lines = file.read(end - start).split(b"\n")[:-1]
            return past_of(decoded_header(first), lines)
        except OSError as error:
            raise Invalid(
                f"the journal {str(self.path)!r} can't be read: {error.strerror}. Check its permissions, or pass"
                " another file as --journal"
            ) from error
        except (msgspec.MsgspecError, UnicodeError, Invalid) as error:
            raise Invalid(
                f"the journal {str(self.path)!r} can't be resumed: {error}. To start a new job, pass another"
                " file as --journal"
            ) from error

    def make_way(self) -> None:
        """Rename the previous job's journal. Old journals get numeric suffixes, from ``.1`` for the newest.

        Raises:
            Invalid: the journal cannot be kept, one of these files is not a journal or is used by a driver, or this
                file is itself the kept journal of an earlier job.
        """
        check_own(self.path)
        kept = _kept(self.path)
        for each in kept:
            _check_unwritten(each)
        copy = ""
        try:
            if not has_journal(self.path):
                return
            for each in kept:
                has_journal(each)
            # mkstemp creates a file with a unique name that only this user can read.
            handle, copy = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
            with open(self.path, "rb") as file, open(handle, "wb") as beside:
                shutil.copyfileobj(file, beside)
            remove_older(kept[-1])
            for newer, older in zip(kept[-2::-1], kept[:0:-1], strict=True):
                move_older(newer, older)
                with contextlib.suppress(FileNotFoundError):
                    os.replace(newer, older)
            move_older(self.path, kept[0])
            os.replace(copy, kept[0])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(copy)
            raise Invalid(
                f"the journal {str(self.path)!r} of an earlier job can't be renamed to {kept[0]}:"
                f" {error.strerror}. Move the journal, or pass another file"
            ) from error

    def keep_private(self) -> None:
        """Make the file readable only for this user, because opening an existing file does not change its mode.

        Raises:
            Invalid: the mode cannot be changed.
        """
        try:
            os.fchmod(self.fd, 0o600)
        except OSError as error:
            if error.errno not in _LACKING:
                raise _not_writable(self.path, error) from error

    async def begin(self, header: Header, policy: SnapshotPolicy | None = None) -> FileJournal:
        return FileJournal(self, header, 0, policy)

    async def go_on(
        self, past: RecoveredJob, writer: Writer, policy: SnapshotPolicy | None = None
    ) -> FileJournal:
        """Resume the journal, after removing an incomplete last line left by a crash."""
        return FileJournal(self, Resumed(writer), self._end, policy, entries=past.replayed)

    async def begin_segment(self, header: Header, lines: bytes) -> None:
        """Replace the file by a new segment of the job, and keep the current one as an older segment.

        The new segment is synced to disk before it replaces the file, because the file is all that the next driver
        reads. Other tasks run during the sync and may still write to the current segment.

        Args:
            header: header of the current segment.
            lines: content of the new segment: the header and a snapshot.

        Raises:
            OSError: the new segment cannot be written, or `close` was called. The current segment is unchanged.
            Invalid: the name of a segment belongs to another file.
        """
        new = next_path(self.path)
        remove_unfinished(self.path)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _LACKING:
                    raise
            write_all(fd, lines)
            await _synced(new)
            if self.fd < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            keep_segment(self.path, header.segment)
            os.replace(new, os.path.realpath(self.path))
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        os.close(self.fd)
        self.fd = fd

    def finish_segment(self) -> None:
        """Sync the new name of the file to disk, and delete old segments. Blocks."""
        with contextlib.suppress(OSError):
            _sync(next_path(self.path).parent)
        prune([self.path, *_kept(self.path)], self.limits)

    def outlives(self) -> bool:
        """Return whether the workers of the job in the file outlive their driver. Reads only the header."""
        header = self.header()
        return header is not None and header.outlives

    def header(self) -> Header | None:
        """Return the header of the journal, or None if the file contains no journal.

        The journal may be marked as incomplete.
        """
        if not self.regular:
            return None
        try:
            with open(self.path, "rb") as file:
                return decoded_header(file.readline())
        except (OSError, UnicodeError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileJournal(Journal):
    """Journal file that is open for writing, from offset ``at`` on."""

    def __init__(
        self,
        archive: FileArchive,
        first: Header | Resumed,
        at: int,
        policy: SnapshotPolicy | None,
        *,
        entries: int = 0,
    ) -> None:
        super().__init__(policy, entries=entries)
        self._archive = archive
        self._pending: list[bytes] = []  # lines that are not written yet
        self.writer = first.writer if isinstance(first, Header) else first.resumed
        self._size = at  # bytes in the current segment
        # size of the segment at which the next attempt to begin a new one is made
        self._retry_at = 0
        # None if the journal has no segments, because it is a device or a pipe
        self._header = first if isinstance(first, Header) else archive.header()
        if not archive.regular:
            self._header = None
        if archive.regular:
            try:
                if at == 0:
                    archive.make_way()
                archive.keep_private()
                with contextlib.suppress(OSError, Invalid):  # the next segment reports the problem
                    remove_unfinished(archive.path)
            except Invalid:
                archive.close()
                raise
            os.ftruncate(archive.fd, at)
            os.lseek(archive.fd, at, os.SEEK_SET)
        self._write(encoded(first))

    @classmethod
    def begin(
        cls, path: Path, settings: Settings, policy: SnapshotPolicy | None = None
    ) -> FileJournal:
        """Begin the journal of a job that ends with its driver.

        Raises:
            Invalid: the previous journal cannot be kept, or the file is not a journal. See `FileArchive.make_way`.
        """
        return cls(FileArchive(path), header_of(settings, writer=writer_here()), 0, policy)

    async def settle(self) -> None:
        """Write pending entries. All other entries are already in the file, which survives this process."""
        self._write_pending()
        if self._segment_due(overdue=True):
            await self._begin_segment()

    async def rest(self) -> None:
        """Begin a new segment or take a snapshot, if one is due and no worker waits for the driver.

        If a driver may resume from the journal, a new segment begins instead of a snapshot that is due anyway.
        """
        if self._segment_due() and (not self.resumable or self.due()) and self.suits():
            await self._begin_segment()
        else:
            await super().rest()

    def trouble(self, at: float, reason: Reason) -> None:
        self._write(encoded(TroubleLine(reason, at)))

    def close(self) -> None:
        self._write_pending()
        self._archive.close()

    def _write_pending(self) -> None:
        if self._pending:
            self._write(b"")

    def _keep(self, entry: Entry) -> int:
        line = encoded(entry)
        if entry.more and len(self._pending) < TOGETHER:
            self._pending.append(line)
        else:
            self._write(line)
        return len(line)

    def keep_snapshot(self, data: bytes, at: float) -> None:
        self._write(encoded(Snapshot(msgspec.Raw(data), at, self.writer)))

    # ---- segments --------------------------------------------------------------------------------------------------

    def _segment_due(self, *, overdue: bool = False) -> bool:
        if self.take is None or self._header is None or not self.ring:
            return False
        if self._size < self._retry_at:
            return False
        return self._archive.limits.reached(
            self._size, self.schedule.snapshot_size, overdue=overdue
        )

    async def _begin_segment(self) -> None:
        """Begin a new segment with a snapshot of the state. If this fails, the current segment grows instead."""
        self._write_pending()
        data = self.taken()
        if data is None or self._header is None:
            return
        header = msgspec.structs.replace(self._header, segment=self._header.segment + 1)
        snapshot = Snapshot(msgspec.Raw(data), self.ring[-1].at, self.writer)
        lines = encoded(header) + encoded(snapshot)
        try:
            await self._archive.begin_segment(self._header, lines)
        except (OSError, Invalid) as error:
            if self._archive.fd < 0:
                return  # the journal was closed
            self._retry_at = 2 * self._size
            why = str(error)
            if isinstance(error, OSError):
                why = f"{error.strerror}. Check the free space and the permissions of its folder"
            self.failed(
                f"the journal {str(self._archive.path)!r} grows beyond its limit, because no new segment can be"
                f" written: {why}"
            )
            return
        self._header, self._size, self._retry_at = header, len(lines), 0
        self.schedule.taken(len(data))
        with contextlib.suppress(asyncio.TimeoutError):
            await to_thread(self._archive.finish_segment, within_s=SYNC_S)

    # ---- lines -----------------------------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        """Write the pending lines and this line."""
        if self._archive.fd < 0:
            return
        if self._pending:
            line, self._pending = b"".join([*self._pending, line]), []
        try:
            write_all(self._archive.fd, line)
            self._size += len(line)
        except OSError as error:
            path = repr(str(self._archive.path))
            followed = ""
            if self.resumable and self.take is not None:
                self._abandon()
                followed = "; no other driver can continue this job after this one"
            self.close()
            self.failed(f"the journal {path} ends here: {error.strerror}{followed}")

    def _abandon(self) -> None:
        """Mark the journal as incomplete, so that no driver resumes from it.

        The mark overwrites existing bytes, so that it works even if the disk is full.
        """
        try:
            with open(self._archive.path, "r+b") as file:
                head = file.read(len(BEGINNING))
                if head == BEGINNING:
                    file.write(str(ABANDONED).encode())
        except OSError:
            # Ignore the error: the next driver will find that the workers' generation is missing from the journal.
            return


def check_own(path: Path) -> None:
    """Raise Invalid if the file is the kept journal of an earlier job, or belongs to the segments of a journal."""
    if path.suffix in (f".{number}" for number in range(1, KEPT + 1)):
        other: Path | None = path.with_suffix("")
    else:
        other = journal_of_segment(path)
    if other is None:
        return
    taken = False
    with contextlib.suppress(OSError, Invalid):
        taken = has_journal(other)
    if taken:
        raise Invalid(
            f"{str(path)!r} is reserved for a rotated copy of the journal {str(other)!r}: pass another file as"
            " --journal"
        )


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes. Raises OSError if they cannot be written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _kept(path: Path) -> list[Path]:
    """Return the journals of earlier jobs, newest first."""
    return [Path(f"{path}.{number}") for number in range(1, KEPT + 1)]


def _opened_and_locked(path: Path) -> int:
    for _ in range(OPENED):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_writable(path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LACKING:
                return fd  # a device, or a file system without locks
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise _in_use(path) from error
            raise _not_writable(path, error) from error
        # Another driver may have replaced the file by its next segment after the file was opened.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)
    raise _in_use(path)


async def _synced(path: Path) -> None:
    """Sync a file to disk, in a thread that does not delay the exit of the process.

    Raises:
        OSError: the file cannot be synced, or the storage did not respond within `SYNC_S` seconds.
    """
    try:
        await to_thread(_sync, path, within_s=SYNC_S)
    except asyncio.TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"no response within {SYNC_S:g} s") from None


def _sync(path: Path) -> None:
    """Sync a file or folder to disk.

    Ignores a path that no longer exists, because the switch was cancelled, and file systems that cannot sync a folder.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
    finally:
        os.close(fd)


def _check_unwritten(path: Path) -> None:
    """Raise Invalid if a driver is writing the file. Called before the file is moved or removed."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path) from None
    except OSError:
        return  # the file does not exist, or its file system does not support locks


def _last(fd: int, what: bytes, end: int) -> int:
    """Return the offset of the last occurrence of ``what`` before offset ``end``, or -1. Reads backwards."""
    while end > 0:
        start = max(0, end - BLOCK)
        found = os.pread(fd, end - start, start).rfind(what)
        if found >= 0:
            return start + found
        end = start + len(what) - 1 if start else 0  # overlap, because a match may span two blocks
    return -1


def _not_writable(path: Path, error: OSError) -> Invalid:
    return Invalid(
        f"cannot write the journal {str(path)!r}: {error.strerror}; pass a path in a writable folder"
    )


def _in_use(path: Path) -> Invalid:
    """Return the error for a journal that is in use.

    The message names the driver that holds the lock: the one in the last takeover line, or else in a snapshot or in the
    header.
    """
    pid = 0
    try:
        with open(path, "rb") as file:
            writer = decoded_header(file.readline()).writer
            size = file.seek(0, os.SEEK_END)
            for beginning in (b'\n{"resumed":', b"\n" + SNAPSHOT):
                start = _last(file.fileno(), beginning, size) + 1
                if start:
                    file.seek(start)
                    writer = _writer_in(decoded(file.readline())) or writer
                    break
            pid = writer.pid
    except (OSError, UnicodeError, msgspec.MsgspecError):
        pass  # the other driver has just started and has not written its header yet
    owner = f"the driver with process ID {pid}" if pid else "another driver"
    return Invalid(
        f"{owner} writes the journal {str(path)!r}: wait until it ends, stop it, or pass another file"
    )


def _writer_in(line: Line) -> Writer | None:
    match line:
        case Resumed(writer) | Snapshot(writer=writer):
            return writer
    return None
