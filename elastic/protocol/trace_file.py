"""Timeline file to which events are appended, and which is valid JSON at all times.

The file is one JSON array. Each write puts the new events and a new closing bracket over the old bracket in a single
pwrite, so that whenever the process is killed, the file has the previous array or the new one. If the disk takes only
part of a write, that part is cut off again and the old bracket restored.

File systems do not guarantee that a concurrent reader sees all of a write or none of it. It can see a part of it during
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
    """Return whether a new timeline may replace the file at this path: it is missing, empty, or a timeline."""
    try:
        with open(path, "rb") as file:
            return file.read(len(OPENING)) in (b"", OPENING)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False  # TraceFile reports the error.


class TraceFile:
    """New timeline file, which replaces an existing file at the path. Raises Invalid if it cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # The file is written under a temporary name first, so that the path contains valid JSON from the start.
            target = os.path.realpath(path)
            beginning = f"{target}.{os.getpid()}.new"
            if os.path.exists(target) and not os.path.isfile(target):
                raise OSError(errno.EINVAL, "the path is not a regular file")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beginning)  # O_EXCL does not follow a link that is put there now.
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
        # ValueError means that the path contains a null character.
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise Invalid(
                f"the timeline {path!r} can't be written: {why}. Pass the path of a file in a writable folder"
            ) from None
        self._end = len(OPENING)  # offset of the next event
        self._empty = True
        self.size = self._end + len(CLOSING)  # size of the file in bytes

    def append(self, events: Sequence[str]) -> None:
        """Append JSON objects. Raises OSError if the disk is full, leaving the file as it was."""
        if not events:
            return
        comma = b"" if self._empty else b",\n"
        text = comma + ",\n".join(events).encode()
        try:
            self._put(text + CLOSING, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, CLOSING, self._end)  # These blocks are already allocated.
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
        if written != len(text):  # The error of a full disk is raised at the next write.
            raise OSError(
                errno.ENOSPC, f"no space left on the device after {written} of {len(text)} bytes"
            )
