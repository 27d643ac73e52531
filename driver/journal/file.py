"""Journal of a job in a file, from which a replacement driver restores the job's state. Makes no decisions.

Each entry is in the file when `settle` returns, so that the next driver finds it even if this driver is killed. An
entry is written when it is recorded, unless another event is already queued (`Entry.more`). It is then written together
with the entry of that event. Entries are not synced to disk: a power failure may lose the latest entries, but it also
ends the workers on the machine. A lock on the file prevents a second driver from writing while the first one runs.
"""

from __future__ import annotations

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
    Resumed,
    Snapshot,
    TroubleLine,
    Writer,
    decoded_header,
    encoded,
    header_of,
)
from elastic.driver.journal.journal import Journal, SnapshotPolicy
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.resume import past_of, writer_here
from elastic.driver.reasons import Reason
from elastic.driver.settings import Settings
from elastic.errors import Invalid

KEPT = 5  # maximum number of earlier jobs whose journals are kept
TOGETHER = 1000  # maximum number of entries that are written with a later one
BLOCK = 1 << 20  # bytes per read in the search for the last snapshot
_LACKING = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FileArchive:
    """Journal file that stays locked while this object exists."""

    def __init__(self, path: Path) -> None:
        """Open and lock the journal file.

        Raises:
            Invalid: the file cannot be written, or another driver writes it.
        """
        self.path = path
        self._end = 0  # offset of the end of the last complete line
        try:
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_writable(path, error) from error
        # whether it is a regular file rather than a device or a pipe
        self.regular = stat.S_ISREG(os.fstat(self.fd).st_mode)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LACKING:
                return  # a device, or a file system without locks
            os.close(self.fd)
            if isinstance(error, BlockingIOError):
                raise _in_use(path) from error
            raise _not_writable(path, error) from error

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
                _check(self.path, first)
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
        kept = [Path(f"{self.path}.{number}") for number in range(1, KEPT + 1)]
        for each in kept:
            _check_unwritten(each)
        copy = ""
        try:
            if not _has_journal(self.path):
                return
            for each in kept:
                _has_journal(each)
            # mkstemp creates a file with a unique name that only this user can read.
            handle, copy = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
            with open(self.path, "rb") as file, open(handle, "wb") as beside:
                shutil.copyfileobj(file, beside)
            for newer, older in zip(kept[-2::-1], kept[:0:-1], strict=True):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(newer, older)
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
        if archive.regular:
            try:
                if at == 0:
                    archive.make_way()
                archive.keep_private()
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

    def _write(self, line: bytes) -> None:
        """Write the pending lines and this line."""
        if self._archive.fd < 0:
            return
        if self._pending:
            line, self._pending = b"".join([*self._pending, line]), []
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._archive.fd, view) :]
        except OSError as error:
            path = repr(str(self._archive.path))
            followed = ""
            if self.take is not None:
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
    """Raise Invalid if the file is the kept journal of an earlier job."""
    if path.suffix not in (f".{number}" for number in range(1, KEPT + 1)):
        return
    other, taken = path.with_suffix(""), False
    with contextlib.suppress(OSError, Invalid):
        taken = _has_journal(other)
    if taken:
        raise Invalid(
            f"{str(path)!r} is reserved for a rotated copy of the journal {str(other)!r}: pass another file as"
            " --journal"
        )


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


def _has_journal(path: Path) -> bool:
    """Return whether the file contains a journal. Return False if it is empty.

    Raises:
        Invalid: the file contains other data.
        OSError: the file cannot be read.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False
    if not regular:
        raise _no_journal(path)
    with open(path, "rb") as file:
        first = file.read(len(BEGINNING))
    _check(path, first)
    return bool(first)


def _check(path: Path, first: bytes) -> None:
    """Check that a file is a journal.

    Args:
        first: beginning of the file.

    Raises:
        Invalid: the file is not a journal.
    """
    if not first.startswith(BEGINNING[: len(first)]):
        raise _no_journal(path)


def _no_journal(path: Path) -> Invalid:
    return Invalid(
        f"{str(path)!r} is not a journal and would be overwritten: move the file, or pass another file"
    )


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

    The message names the driver that holds the lock: the one in the last takeover line, or else in the header.
    """
    pid = 0
    try:
        with open(path, "rb") as file:
            first = file.readline()
            size = file.seek(0, os.SEEK_END)
            start = _last(file.fileno(), b'\n{"resumed":', size) + 1
            if start:
                file.seek(start)
                pid = msgspec.json.decode(file.readline(), type=Resumed).resumed.pid
            else:
                pid = decoded_header(first).writer.pid
    except (OSError, UnicodeError, msgspec.MsgspecError):
        pass  # the other driver has just started and has not written its header yet
    owner = f"the driver with process ID {pid}" if pid else "another driver"
    return Invalid(
        f"{owner} writes the journal {str(path)!r}: wait until it ends, stop it, or pass another file"
    )
