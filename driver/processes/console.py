"""Non-blocking output to the driver's stdout and stderr. Makes no decisions.

A paused terminal, a pager or a full disk may block a write indefinitely, so one thread per stream writes from a bounded
queue. When the queue is full, training continues and the oldest lines are dropped, because the newest lines explain why
a job ends. A line reports the number of dropped bytes. A closed pipe ends the output, never the job.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

Write = Callable[[bytes], None]  # function that writes all bytes, or raises OSError or ValueError

QUEUE_LIMIT = 16 * 1024 * 1024  # maximum size of the queue, in bytes
BATCH_LIMIT = 1024 * 1024  # maximum size of one write, in bytes
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
COLOURS = {"debug": "2", "info": "", "warning": "33", "error": "31"}


class WriterThread:
    """Queue of writes, with a thread that performs them in order. ``put`` is thread-safe.

    ``failed`` is called in the writer's thread when a write fails for the first time.
    """

    def __init__(self, name: str, failed: Callable[[str], None], limit: int = QUEUE_LIMIT) -> None:
        self._name = name
        self._failed = failed
        self._limit = limit
        self._queue: deque[tuple[Write, bytes]] = deque()
        self._queued = 0  # number of queued bytes
        self._dropped = 0  # number of dropped bytes that were not reported yet
        self._writing = False
        self._closed = False
        self._failure_logged = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, write: Write, data: bytes) -> None:
        """Queue the call ``write(data)`` without blocking. If the queue is full, drop the oldest data."""
        with self._changed:
            if self._closed or not data:
                return
            self._queue.append((write, data))
            self._queued += len(data)
            while self._queued > self._limit:
                oldest = len(self._queue.popleft()[1])
                self._queued -= oldest
                self._dropped += oldest
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"writes {self._name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all data has been written, for at most ``timeout_s`` seconds. None means no limit.

        Returns False on timeout.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)

    def close(self, timeout_s: float | None) -> bool:
        """Call `wait`, then end the thread. Later writes are discarded. Return the result of `wait`."""
        try:
            complete = self.wait(timeout_s)
        finally:  # also after Ctrl-C, which ends the wait
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        if complete and self._thread is not None:
            self._thread.join(timeout_s)
        return complete

    def waits_for(self) -> str:
        """Return a line for the user that reports the number of unwritten bytes after the end of the job."""
        with self._changed:
            left = f"more than {self._queued} bytes of output are pending: {self._name} is slow"
        return f"elastic | the job has ended, but {left}; Ctrl-C ends the wait without them\n"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                write, data = self._take()
                self._writing = True
            try:
                write(data)
            except (OSError, ValueError) as error:
                if not self._failure_logged:
                    self._failure_logged = True
                    self._failed(f"cannot write to {self._name}: {error}; this output is lost")

    def _take(self) -> tuple[Write, bytes]:
        if self._dropped and self._queue:
            notice = (
                f"elastic | {self._dropped} bytes of output were dropped: {self._name} is slow\n"
            )
            self._dropped = 0
            return self._queue[0][0], notice.encode()
        write, data = self._queue.popleft()
        pieces, size = [data], len(data)
        # Compared with == instead of `is`, because each access to a method creates a new bound method.
        while self._queue and self._queue[0][0] == write and size < BATCH_LIMIT:
            pieces.append(self._queue.popleft()[1])
            size += len(pieces[-1])
        self._queued -= size
        return write, b"".join(pieces)


def write_to(stream: TextIO | None) -> Write:
    """Return a function that writes to a stream such as sys.stdout, through its file descriptor if possible.

    If the stream is None, the function discards the data. sys.stdout is None if a daemon or a batch system closed it
    before Python started. The descriptor is used because a thread that blocks in the lock of a Python stream makes the
    interpreter fail at exit, while a thread that blocks in the system call does not.
    """
    if stream is None:
        return lambda data: None
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):

        def write_text(data: bytes) -> None:
            stream.write(data.decode(errors="replace"))
            stream.flush()

        return write_text

    def write_fd(data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                # Another process has set the terminal to non-blocking mode.
                select.select([], [fd], [], 1.0)

    return write_fd


def write_both(stdout: TextIO | None, stderr: TextIO | None) -> tuple[Write, Write]:
    """Return the results of `write_to` for two streams.

    If both streams have the same destination, as with ``2>&1``, both results are the same function.
    """
    out = write_to(stdout)
    try:
        one = os.path.sameopenfile(stdout.fileno(), stderr.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        one = False
    return out, out if one else write_to(stderr)


def replace_closed_streams() -> None:
    """Open /dev/null for each standard stream that was closed before Python started, as in some batch systems.

    Otherwise, the next file or socket could get file descriptor 2 and receive the output for stderr.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            # The new file gets the lowest free file descriptor, which is that of the closed stream.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal.

    Args:
        stream: a stream such as sys.stderr, which may be closed or None.
    """
    return stream is not None and not stream.closed and stream.isatty()


def _printable(line: str) -> str:
    """Remove terminal control characters from a line, because it may contain text from a worker or another host."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line)


def shown(text: str) -> str:
    """Escape control characters, and characters that stdout cannot encode, for output to stdout."""
    encoding = sys.stdout.encoding or "utf-8"
    lines = "\n".join(map(_printable, text.split("\n")))
    return lines.encode(encoding, errors="backslashreplace").decode(encoding)


class Console:
    """Writer of the driver's own log lines: ``elastic | 12:01:33 | text``.

    Callable with a level and one or more lines of text. ``on_line`` is called with every line that is shown.
    """

    def __init__(
        self,
        put: Callable[[bytes], None],
        *,
        level: str = "info",
        colour: bool = False,
        timestamps: bool = True,
        clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
        on_line: Callable[[str, str], None] = lambda level, text: None,
    ) -> None:
        self._put = put
        self._on_line = on_line
        self._timestamps = timestamps
        self._least = LEVELS[level]
        self._colour = colour
        self._clock = clock

    def __call__(self, level: str, text: str) -> None:
        if LEVELS[level] < self._least:
            return
        mark = "" if level in ("debug", "info") else f"{level}: "
        first, *more = [_printable(line) for line in text.splitlines()] or [""]
        at = f"{self._clock()} | " if self._timestamps else ""
        lines = [f"elastic | {at}{mark}{first}", *(f"elastic |   {m}" for m in more)]
        if self._colour and (code := COLOURS[level]):
            lines = [f"\x1b[{code}m{line}\x1b[0m" for line in lines]
        self._put("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        self._on_line(level, text)
