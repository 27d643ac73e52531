"""Appends events to a timeline's file so that it is valid JSON all the time. Decides nothing.

The file is one JSON array. Each write puts the new events and a new closing bracket over the old bracket, in a single
pwrite: whoever is killed, and whenever, the array that was there before or the one after it is what is left. Where the
disk takes only a part of a write, that part is cut off again and the old bracket put back.

What no file system promises is that somebody who reads *while* a write happens sees all of it or nothing: the window is
the microseconds of the copy into the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from elastic.errors import Invalid

OPENING, CLOSING = b"[\n", b"\n]\n"


def is_free(path: str) -> bool:
    """Whether there is nothing at this path that a new timeline would destroy: no file, an empty one, or a timeline."""
    try:
        with open(path, "rb") as file:
            return file.read(len(OPENING)) in (b"", OPENING)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False  # what is wrong with it, TraceFile says


class TraceFile:
    """A new file in the place of whatever was at this path. Raises Invalid if it can't be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Written under another name first: the path leads to valid JSON from its first moment on.
            target = os.path.realpath(path)
            beginning = f"{target}.{os.getpid()}.new"
            if os.path.exists(target) and not os.path.isfile(target):
                raise OSError(errno.EINVAL, "it is not a regular file")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beginning)  # and if somebody puts a link there now, it is not followed
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
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise Invalid(
                f"the timeline {path!r} can't be written: {why}; pass the path of a file in a writable folder"
            ) from None
        self._end = len(OPENING)  # where the next event goes
        self._empty = True
        self.size = self._end + len(CLOSING)  # bytes

    def append(self, events: Sequence[str]) -> None:
        """Each is one JSON object. Raises OSError if they found no room; then the file is as before."""
        if not events:
            return
        comma = b"" if self._empty else b",\n"
        text = comma + ",\n".join(events).encode()
        try:
            self._put(text + CLOSING, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, CLOSING, self._end)  # its blocks are there already
                os.ftruncate(self._fd, self.size)
            raise
        self._end += len(text)
        self._empty = False
        self.size = self._end + len(CLOSING)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, text: bytes, at: int) -> None:
        written = os.pwrite(self._fd, text, at)
        if written != len(text):  # a full disk says so only at the next write
            raise OSError(errno.ENOSPC, f"no space after {written} of {len(text)} bytes")
