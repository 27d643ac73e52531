"""Forwarding of the workers' output, line by line with the rank as a prefix. Makes no decisions.

The prefix of a line is the worker's current rank, such as ``[2] ``, or ``[host:slot] `` while it has no rank. Bytes are
forwarded unchanged, in any encoding. A carriage return also ends a line, so that progress bars work. If a folder is
given, the same bytes are also written without a prefix to its files ``rank.<r>/stdout`` and ``rank.<r>/stderr``.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic.driver.events import ExitCause
from elastic.driver.monitoring.stack_excerpts import training_stack
from elastic.driver.output_interfaces import Stream
from elastic.driver.processes.console import Write, WriterThread
from elastic.driver.processes.stderr_tail import DiagnosticLines, StderrTails, TracebackLedger
from elastic.protocol.messages import Place, Worker
from elastic.protocol.uncaught.sending import Uncaught

# callback for lines; called with the worker, its name, the stream and the lines
LinesListener = Callable[[Worker, str, Stream, Sequence[bytes]], None]

LINE_LIMIT = 64 * 1024  # maximum length of a line, in bytes; longer lines are split
STACKS_S = 0.2  # seconds to wait for all lines of a worker's stack dump
# Seconds after the end of a job at which a line reports that the remaining output is not being read.
REMIND_S = 5.0

# A carriage return at the end of the data does not match yet, because it may be the first half of "\r\n".
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?=[^\n])")


class Output:
    """Writer of the output of all workers.

    Args:
        place_of: function that returns a worker's current place, or None.
        stdout: function that writes to the driver's stdout.
        stderr: function that writes to the driver's stderr.
        failed: called once when a stream cannot be written.
        verbose: whether to show all frames of exceptions.
        on_unlogged: called when ``tracebacks.rest()`` would return new lines to log.
        asked: function that returns whether an operator requested a worker's stacks.
        timestamps: whether to prefix lines with the time.
        folder: folder for output files. None means no files.
        clock: function that returns the current time as text.
        on_lines: called with all lines, for other readers of the output.
    """

    def __init__(
        self,
        *,
        place_of: Callable[[Worker], Place | None],
        stdout: Write,
        stderr: Write,
        failed: Callable[[str], None] = lambda text: None,
        verbose: bool = False,
        on_unlogged: Callable[[], None] = lambda: None,
        asked: Callable[[Worker], bool] = lambda worker: False,
        timestamps: bool = False,
        folder: Path | None = None,
        clock: Callable[[], str] = lambda: time.strftime("%Y-%m-%d %H:%M:%S"),
        on_lines: LinesListener = lambda worker, name, stream, lines: None,
    ) -> None:
        self._place_of = place_of
        self._on_lines = on_lines
        self._write: dict[Stream, Write] = {"stdout": stdout, "stderr": stderr}
        out = WriterThread("stdout", failed)
        # If stdout and stderr have the same destination, they share a queue, so that the reason for an exit appears
        # after the preceding output. Errors on stderr cannot be reported.
        err = out if stdout == stderr else WriterThread("stderr", lambda text: None)
        self._writers: dict[Stream, WriterThread] = {"stdout": out, "stderr": err}
        self._files = WriterThread(f"files under {folder}", failed)
        self._folder = folder
        self._timestamps = timestamps
        self._clock = clock
        self._partial: dict[tuple[Worker, Stream], bytearray] = {}
        self._tails = StderrTails()
        self._diagnostics = DiagnosticLines()
        self._on_unlogged = on_unlogged
        self.tracebacks = TracebackLedger(verbose=verbose)
        self._verbose = verbose
        self._asked = asked
        self._stacks: dict[Worker, list[str]] = {}  # stack dumps that are being received
        self.sent: set[Worker] = set()  # workers that have sent their uncaught exception
        self._appends: dict[Path, Write] = {}

    def write_line(self, data: bytes) -> None:
        """Write a line of the driver to stderr, never in the middle of a worker's line."""
        self._writers["stderr"].put(self._write["stderr"], data)

    def write_separately(self, write: Write, data: bytes) -> None:
        """Call ``write(data)`` in the thread that writes stderr, in order with other output to stderr."""
        self._writers["stderr"].put(write, data)

    def feed(self, worker: Worker, stream: Stream, data: bytes) -> None:
        """Receive output of a worker. See `elastic.driver.output_interfaces.Sink.feed`."""
        if stream == "usage":
            self._on_lines(worker, self._name(worker), stream, [data])
            return
        self._tails.add(worker, stream, data)
        if stream == "diagnostics":
            for each in self._diagnostics.add(worker, data):
                if isinstance(each, Uncaught):
                    self._uncaught(worker, each)
                elif isinstance(each, bytes):
                    self._stack_line(worker, each)
            return
        rest = self._partial.setdefault((worker, stream), bytearray())
        searched = max(0, len(rest) - 1)
        rest += data
        pieces: list[bytes] = []
        start = 0
        for match in _END_OF_LINE.finditer(rest, searched):
            pieces.append(bytes(rest[start : match.end()]))
            start = match.end()
        del rest[:start]
        while len(rest) > LINE_LIMIT:
            pieces.append(bytes(rest[:LINE_LIMIT]))
            del rest[:LINE_LIMIT]
        self._pass_on(worker, stream, pieces)

    def finish(self, worker: Worker, stream: Stream) -> None:
        """Handle the end of a worker's stream. See `elastic.driver.output_interfaces.Sink.finish`."""
        rest = self._partial.pop((worker, stream), None)
        if rest:
            self._pass_on(worker, stream, [bytes(rest)])

    def tail(self, worker: Worker) -> str:
        """Return the end of a worker's stderr. See `elastic.driver.output_interfaces.Sink.tail`."""
        return self._tails.of(worker)

    def cause(self, worker: Worker) -> ExitCause:
        """Return the reason for a worker's exit, as reported by the worker. See `output_interfaces.Sink.cause`."""
        return self._tails.cause(worker)

    def training_thread(self, worker: Worker) -> int | None:
        """Return a worker's training thread. See `elastic.driver.output_interfaces.Sink.training_thread`."""
        return self._tails.training_thread(worker)

    def drop(self, worker: Worker) -> None:
        """Discard the state of a worker. See `elastic.driver.output_interfaces.Sink.drop`."""
        self._show_stacks(worker)
        self._tails.drop(worker)
        self._diagnostics.drop(worker)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until all pending data has been written, or the reader has closed the stream.

        Args:
            timeout_s: time limit for each stream, in seconds. There is none by default, because no other process waits
                for the driver, and a user may read the output in a pager much later. Ctrl-C ends the wait with
                KeyboardInterrupt.
        """
        for worker, stream in list(self._partial):
            self.finish(worker, stream)
        err = self._writers["stderr"]
        for writer in dict.fromkeys((self._writers["stdout"], self._files, err)):
            if timeout_s is None and writer is not err and not writer.wait(REMIND_S):
                self.write_line(writer.waits_for().encode())
            writer.close(timeout_s)

    def _pass_on(self, worker: Worker, stream: Stream, pieces: list[bytes]) -> None:
        if not pieces:
            return
        self._show(worker, stream, pieces)
        self._on_lines(worker, self._name(worker), stream, pieces)
        self._keep(worker, stream, b"".join(pieces))

    def _uncaught(self, worker: Worker, uncaught: Uncaught) -> None:
        """Show the uncaught exception of a worker, unless the same exception of another worker was already shown.

        The output file of each worker contains its own exception with all frames.
        """
        self.sent.add(worker)
        text = self.tracebacks.add(worker, self._name(worker), uncaught)
        if text:
            self._show(worker, "stderr", _pieces(text))
        else:
            self._on_unlogged()
        self._on_lines(worker, self._name(worker), "stderr", _pieces(uncaught.folded))
        self._keep(worker, "stderr", uncaught.whole.encode())

    def _stack_line(self, worker: Worker, line: bytes) -> None:
        self._on_lines(worker, self._name(worker), "diagnostics", [line])
        self._keep(worker, "stderr", line + b"\n")
        if worker not in self._stacks:
            self._stacks[worker] = []
            asyncio.get_running_loop().call_later(STACKS_S, self._show_stacks, worker)
        self._stacks[worker].append(line.decode(errors="replace"))

    def _show_stacks(self, worker: Worker) -> None:
        text = "".join(f"{line}\n" for line in self._stacks.pop(worker, []))
        if text and not self._asked(worker):
            self._show(worker, "stderr", _pieces(text if self._verbose else training_stack(text)))

    def _name(self, worker: Worker) -> str:
        place = self._place_of(worker)
        return f"{worker.host}:{worker.slot}" if place is None else str(place.rank)

    def _show(self, worker: Worker, stream: Stream, pieces: list[bytes]) -> None:
        stamp = f"{self._clock()} " if self._timestamps else ""
        prefix = f"{stamp}[{self._name(worker)}] ".encode()
        lines = b"".join(_prefixed(prefix, piece) for piece in pieces)
        self._writers[stream].put(self._write[stream], lines)

    def _keep(self, worker: Worker, stream: Stream, data: bytes) -> None:
        if self._folder is None:
            return
        place = self._place_of(worker)
        home = f"{worker.host}.{worker.slot}" if place is None else f"rank.{place.rank}"
        path = self._folder / home.replace("/", "_") / stream
        if path not in self._appends:
            self._appends[path] = _append_to(path)
        self._files.put(self._appends[path], data)


def _pieces(text: str) -> list[bytes]:
    return text.encode().splitlines(keepends=True)


def _prefixed(prefix: bytes, piece: bytes) -> bytes:
    """Add the prefix to a line.

    If the line has no end, a newline is appended, so that the output of another worker starts on a new line.
    """
    if piece == b"\r":
        # A progress bar may start with a carriage return, which therefore gets neither a prefix nor a newline.
        return piece
    return prefix + piece if piece[-1:] in b"\r\n" else prefix + piece + b"\n"


def _append_to(path: Path) -> Write:
    """Return a function that appends to a file and opens it for each write.

    Keeping the files of thousands of ranks open would exceed the limit on open files, and log files may be moved.
    """

    def append(data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    return append
