"""Output sink of an agent process that forwards workers' output to the driver. Makes no decisions.

Workers never block on output while no driver is connected: their output is buffered up to a limit. Output beyond the
limit is replaced by a line with the number of omitted bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from elastic.driver.agents.messages import Printed
from elastic.driver.events import ExitCause
from elastic.driver.output_interfaces import Stream
from elastic.driver.processes.stderr_tail import StderrTails
from elastic.protocol.messages import Worker

KEPT_LIMIT = 4 * 1024 * 1024  # maximum buffered output per host, in bytes
CONGESTED = 8 * 1024 * 1024  # bytes pending on the connection above which output is buffered


class ForwardingSink:
    """Sink that forwards output to the driver. See `elastic.driver.output_interfaces.Sink`.

    Args:
        send: function that sends a message. It returns False if no driver is connected.
        backlog: function that returns the number of bytes pending on the connection.
    """

    def __init__(self, send: Callable[[Printed], bool], backlog: Callable[[], int]) -> None:
        self._send = send
        self._backlog = backlog
        self._tails = StderrTails()
        self._kept: deque[Printed] = deque()
        self._kept_bytes = 0
        self._left_out: dict[tuple[Worker, Stream], int] = {}

    def feed(self, worker: Worker, stream: Stream, data: bytes) -> None:
        if stream == "usage":  # not buffered, because measurements soon become outdated
            if not self._kept and self._backlog() < CONGESTED:
                self._send(Printed(worker, stream, data))
            return
        self._tails.add(worker, stream, data)
        self._pass_on(Printed(worker, stream, data))

    def finish(self, worker: Worker, stream: Stream) -> None:
        self._pass_on(Printed(worker, stream, b""))

    def tail(self, worker: Worker) -> str:
        return self._tails.of(worker)

    def cause(self, worker: Worker) -> ExitCause:
        return self._tails.cause(worker)

    def training_thread(self, worker: Worker) -> int | None:
        return self._tails.training_thread(worker)

    def drop(self, worker: Worker) -> None:
        self._tails.drop(worker)

    def catch_up(self) -> None:
        """Send buffered output, if a driver is connected and the connection can take more data."""
        while self._kept and self._backlog() < CONGESTED:
            if not self._send(self._kept[0]):
                return
            self._kept_bytes -= len(self._kept.popleft().data)
        if not self._kept:
            for (worker, stream), count in [*self._left_out.items()]:
                text = f"\n[{count} bytes of output omitted]\n"
                if self._send(Printed(worker, stream, text.encode())):
                    del self._left_out[worker, stream]

    def _pass_on(self, printed: Printed) -> None:
        if self._kept or self._left_out:
            self.catch_up()
        if not self._kept and self._backlog() < CONGESTED and self._send(printed):
            return
        key = (printed.worker, printed.stream)
        if printed.data and (
            key in self._left_out or self._kept_bytes + len(printed.data) > KEPT_LIMIT
        ):
            self._left_out[key] = self._left_out.get(key, 0) + len(printed.data)
            return
        self._kept.append(printed)
        self._kept_bytes += len(printed.data)
