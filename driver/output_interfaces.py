"""Interfaces for log lines and worker output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from elastic.driver.events import ExitCause
from elastic.protocol.messages import Worker

# "diagnostics": messages of a worker in addition to its output (see `elastic.protocol.uncaught`). "usage": one Usage as
# JSON per chunk, measured by the worker's host.
Stream = Literal["stdout", "stderr", "diagnostics", "usage"]
# function that writes a log line, given its level ("debug", "info", "warning" or "error") and its text
Log = Callable[[str, str], None]


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resource usage of one worker. None means that a value is unknown.

    Args:
        cores: number of CPU cores in use, averaged since the last measurement.
        memory: memory, in bytes.
        gpu: utilization of the worker's busiest GPU by all processes, from 0 to 1.
        gpu_memory: GPU memory, in bytes.
    """

    cores: float | None = None
    memory: int = 0
    gpu: float | None = None
    gpu_memory: int | None = None


class Sink(Protocol):
    """Destination of the workers' output. See `elastic.driver.processes.worker_output`."""

    def feed(self, worker: Worker, stream: Stream, data: bytes) -> None:
        """Accept output in the order in which it was written. A chunk may end in the middle of a line."""

    def finish(self, worker: Worker, stream: Stream) -> None:
        """Forward an incomplete last line, because the stream has ended or the worker waits for input."""

    def tail(self, worker: Worker) -> str:
        """Return the end of the worker's stderr so far, at most about 20 KB, including its uncaught exception."""

    def cause(self, worker: Worker) -> ExitCause:
        """Return the reason for the worker's exit, as far as the worker has reported it."""

    def training_thread(self, worker: Worker) -> int | None:
        """Return the native ID of the worker's training thread, or None before its ``init()``."""

    def drop(self, worker: Worker) -> None:
        """Discard the state of a worker. Called after its exit and the end of its streams."""
