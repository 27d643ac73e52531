"""Records of this machine's running jobs in a private folder, for commands of the same user.

    $XDG_RUNTIME_DIR/hvd-elastic/PID-PORT.json, or hvd-elastic-UID/PID-PORT.json in the folder for temporary files

Each driver writes a file with its address and the operators' key, and holds a lock on the file while it runs. A folder
that belongs to another user or is accessible to other users is rejected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastic.errors import Invalid


class JobRecord(msgspec.Struct, frozen=True):
    """Record with the address and key of a running job."""

    name: str
    pid: int  # process ID of the driver
    address: str  # address of the operator service, host:port
    key: str  # operators' key, hexadecimal
    command: list[str] = []
    journal: str = ""
    began: float = 0.0  # time at which the driver started, in seconds since 1970

    def __repr__(self) -> str:
        return f"JobRecord({self.name!r}, pid={self.pid}, address={self.address!r})"


class PublishedRecord:
    """Record file of a running job, valid until `close` is called or the process exits.

    Raises:
        Invalid: other users can access the folder.
        OSError: the record can't be written.
    """

    def __init__(self, environ: Mapping[str, str], record: JobRecord) -> None:
        folder = runtime_folder(environ)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        checked_folder(folder)
        self.path = folder / f"{record.pid}-{record.address.rpartition(':')[2]}.json"
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()  # The file is left from an earlier process with the same process ID.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, msgspec.json.encode(record))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._fd)


def runtime_folder(environ: Mapping[str, str]) -> Path:
    """Return the path of the folder with the records, without creating it."""
    given = environ.get("XDG_RUNTIME_DIR", "")
    if given and os.path.isdir(given):
        return Path(given) / "hvd-elastic"
    return Path(tempfile.gettempdir()) / f"hvd-elastic-{os.geteuid()}"


def checked_folder(folder: Path) -> Path:
    """Return the path of the folder, or raise Invalid if another user can access the folder."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise Invalid(
            f"{folder} must be accessible only to you (mode 0700): remove the folder, or set XDG_RUNTIME_DIR to"
            " your own folder"
        )
    return folder


def records(environ: Mapping[str, str]) -> list[JobRecord]:
    """Return the records of running jobs, oldest first. Also removes the records of killed drivers.

    Raises:
        Invalid: the folder of the records is not accessible or belongs to another user.
    """
    folder = runtime_folder(environ)
    try:
        if not folder.exists():
            return []
    except PermissionError:  # XDG_RUNTIME_DIR may belong to another user, for example after `su`.
        raise Invalid(
            f"{folder.parent} is not accessible to you: set XDG_RUNTIME_DIR to your own folder, or unset it"
        ) from None
    found = [_read(path) for path in checked_folder(folder).glob("*.json")]
    return sorted((each for each in found if each is not None), key=lambda each: each.began)


def _read(path: Path) -> JobRecord | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # another process has removed the record
    with os.fdopen(fd, "rb") as file:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                return msgspec.json.decode(file.read(), type=JobRecord)
            return None
        with contextlib.suppress(OSError):
            path.unlink()
        return None
