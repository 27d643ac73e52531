"""Reader of a worker's output stream that forwards bytes to the sink as they arrive. Makes no decisions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from elastic.driver.output_interfaces import Sink, Stream
from elastic.protocol.messages import Worker

CHUNK = 64 * 1024
# maximum number of bytes read from the pipe of an exited worker before the exit is reported
DRAIN_LIMIT = 1024 * 1024
# seconds without further output after which an incomplete line is treated as a prompt
PROMPT_S = 0.1


class Pipe:
    """Read end of one output stream of a worker. ``closed`` is called once, at the end of the stream.

    Args:
        prompts: whether the worker has standard input and may print a prompt. If so, an incomplete line is forwarded
            when no further output follows it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        worker: Worker,
        stream: Stream,
        sink: Sink,
        *,
        prompts: bool = False,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._worker = worker
        self._stream: Stream = stream
        self._sink = sink
        self._open = True
        self._prompts = prompts
        self._prompt: asyncio.TimerHandle | None = None
        # Pipes that are drained before data of this pipe is forwarded.
        self.later_than: list[Pipe] = []
        self.closed: Callable[[Pipe], None] = lambda pipe: None
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        if not self._open:
            return False
        for pipe in self.later_than:
            pipe.drain()
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._sink.feed(self._worker, self._stream, data)
        if self._prompts:
            self._forget_prompt()
            self._prompt = self._loop.call_later(
                PROMPT_S, self._sink.finish, self._worker, self._stream
            )
        return True

    def _forget_prompt(self) -> None:
        if self._prompt is not None:
            self._prompt.cancel()
            self._prompt = None

    def drain(self) -> None:
        """Forward the available data, up to DRAIN_LIMIT bytes, without waiting."""
        for _ in range(DRAIN_LIMIT // CHUNK):
            if not self._read():
                return

    def end_within(self, timeout_s: float) -> None:
        if self._open:
            self._loop.call_later(timeout_s, self.close)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._forget_prompt()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._sink.finish(self._worker, self._stream)
            self.closed(self)
