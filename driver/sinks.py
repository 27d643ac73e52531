"""Where lines of the log and the output of workers go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from elastic.protocol.messages import Worker

# "diagnostics": what a worker sends beside its output, see `elastic.protocol.uncaught`. "usage": each time a Usage as
# JSON, which its host measures.
Stream = Literal["stdout", "stderr", "diagnostics", "usage"]
Log = Callable[[str, str], None]  # level ("debug", "info", "warning", "error") and text


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker uses. ``cores``: processors in use, on average since the last look. ``memory``, ``gpu_memory``:
    bytes. ``gpu``: the share of time in which its busiest GPU works, whoever has it work. None: not known.
    """

    cores: float | None = None
    memory: int = 0
    gpu: float | None = None
    gpu_memory: int | None = None


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
