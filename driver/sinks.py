"""Where lines of the log and the output of workers go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from elastic.protocol.messages import Worker

# "diagnostics": what a worker sends beside its output, see `elastic.protocol.uncaught`.
Stream = Literal["stdout", "stderr", "diagnostics"]
Log = Callable[[str, str], None]  # level ("debug", "info", "warning", "error") and text


class Sink(Protocol):
    """Where a worker's output goes; see `elastic.driver.processes.output`."""

    def feed(self, worker: Worker, stream: Stream, data: bytes) -> None:
        """Bytes in the order they were written, cut anywhere."""

    def finish(self, worker: Worker, stream: Stream) -> None:
        """No more bytes will come, or it waits for an answer: pass on an incomplete last line."""

    def tail(self, worker: Worker) -> str:
        """The end of what it wrote to stderr so far, at most some 20 KB, with the exception that it ended with."""

    def drop(self, worker: Worker) -> None:
        """It is gone, and all its streams are finished."""
