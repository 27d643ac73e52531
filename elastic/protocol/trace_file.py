"""Timeline file to which events are appended, and which is valid JSON at all times.

The file is one JSON array. Each write replaces the closing bracket by the new events and a new bracket in a single
pwrite, so that the file contains the previous or the new array even if the process is killed. If a write is incomplete
because the disk is full, the written part is removed and the old bracket is restored.

File systems do not guarantee atomic writes to concurrent readers: a reader can see part of a write for the microseconds
in which it is copied to the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from elastic.errors import Invalid

OPENING, CLOSING = b"[\n", b"\n]\n"


def is_free(path: str) -> bool:
    """Return whether a new timeline may replace the file at a path: the file is missing, empty, or a timeline."""
    try:
        with open(path, "rb") as file:
            return file.read(len(OPENING)) in (b"", OPENING)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False  # The constructor of TraceFile reports this error with the reason.


class TraceFile:
    """New timeline file, which replaces any file at the path. Raises Invalid if it cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Write the file under a temporary name first, so that the path contains valid JSON from the start.
            target = os.path.realpath(path)
            beginning = f"{target}.{os.getpid()}.new"
            if os.path.exists(target) and not os.path.isfile(target):
                raise OSError(errno.EINVAL, "it is not a regular file")
            with contextlib.suppress(FileNotFoundError):
                # With O_EXCL, a link that another process has created at this path is not followed.
                os.unlink(beginning)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(beginning, flags, 0o644)
            try:
                self._put(OPENING + CLOSING, 0)
                os.replace(beginning, target)
            except OSError:
                os.close(self._fd)
                with contextlib.suppress(OSError):
                    os.unlink(beginning)
                raise
        # ValueError: the path contains a null character.
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise Invalid(
                f"the timeline {path!r} can't be written: {why}. Pass the path of a file in a writable folder"
            ) from None
        self._end = len(OPENING)  # offset in bytes at which the next event is written
        self._empty = True
        self.size = self._end + len(CLOSING)  # size of the file in bytes

    def append(self, events: Sequence[str]) -> None:
        """Append JSON objects. If the disk is full, raises OSError and leaves the file unchanged."""
        if not events:
            return
        comma = b"" if self._empty else b",\n"
        text = comma + ",\n".join(events).encode()
        try:
            self._put(text + CLOSING, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                # The file already has these blocks, so the write succeeds even on a full disk.
                os.pwrite(self._fd, CLOSING, self._end)
                os.ftruncate(self._fd, self.size)
            raise
        self._end += len(text)
        self._empty = False
        self.size = self._end + len(CLOSING)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, text: bytes, at: int) -> None:
        written = os.pwrite(self._fd, text, at)
        if written != len(text):  # The system would report the full disk only at the next write.
            raise OSError(
                errno.ENOSPC, f"no space left on the device after {written} of {len(text)} bytes"
            )
