"""Transfer of this worker's timeline records to the driver, or to a file in a job without a driver.

With a driver, the driver requests records and the link thread sends them, as `trace_flow_control` decides. Without a
driver, no process can merge the records, so each rank writes a separate file in a separate thread: rank 0 the requested
file, and other ranks the same name with the suffix ``.rank<N>``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from elastic import context
from elastic.errors import DriverLost, Invalid
from elastic.monitoring import timeline
from elastic.monitoring.trace_buffer import TraceBuffer
from elastic.monitoring.trace_flow_control import BATCH, TraceSending
from elastic.protocol import messages as protocol
from elastic.protocol.messages import Message, Place
from elastic.protocol.trace_file import TraceFile
from elastic.protocol.trace_format import TraceFormat
from elastic.rendezvous.worker_settings import DYNAMIC, Environment

ANSWER_S = 10.0  # timeout in seconds for the driver to open or complete a file
WRITE_S = 1.0  # seconds between two writes to a local file
CLOSE_S = 5.0  # timeout in seconds for the last write

Send = Callable[[Message], None]


class TraceSession(Protocol):
    """Interface of the destination of a process's timeline records."""

    def begin(self, place: Place) -> None:
        """Start the timeline of HOROVOD_TIMELINE, once this worker has its rank.

        Raises Invalid if the file cannot be written, and DriverLost if the driver does not answer.
        """

    def start(self, path: str, mark_cycles: bool) -> None:
        """Start a timeline in a file. See `start_timeline`."""

    def stop(self) -> None:
        """End the current timeline. See `stop_timeline`."""

    def close(self) -> None:
        """Send the remaining records, at exit."""

    def receive(self, message: Message) -> bool:
        """Handle a message in the link thread. Return whether it was about a timeline."""

    def due(self) -> None:
        """Send due messages, in the link thread."""


class TracingThroughDriver:
    """Destination that sends records to the driver.

    Args:
        send: function that sends a message; must not raise.
        poke: function that wakes the link thread, which calls ``due``.
    """

    def __init__(self, env: Environment, send: Send, poke: Callable[[], None]) -> None:
        self._env = env
        self._send = send
        self._poke = poke
        self._buffer = TraceBuffer()
        self._lock = threading.Lock()  # held while records are sent, by the link thread or at exit
        self._sending = TraceSending(self._buffer)
        self._asking = threading.Lock()  # lock that permits one request at a time
        self._answered = threading.Condition()
        self._requests = 0
        self._answer: protocol.TimelineAnswer | None = None
        self._present = 0  # number of the timeline that is being recorded
        # Timeline that a stop request of this worker's script refers to, because a late stop must not end a newer
        # timeline that other ranks have started. None means the first timeline: the script has made no request yet.
        self._known: int | None = None

    def begin(self, place: Place) -> None:
        """Request the timeline of HOROVOD_TIMELINE, unless the driver has already announced one."""
        path = self._env.timeline
        if path and path != DYNAMIC and self._known is None and place.rank == 0:
            try:
                self.start(os.path.abspath(path), self._env.timeline_mark_cycles)
            except Invalid as error:
                raise Invalid(f"HOROVOD_TIMELINE={path}: {error}") from error

    def receive(self, message: Message) -> bool:
        match message:
            case protocol.Tracing(number, True, cycles):
                self._present = number
                if self._known is None:
                    self._known = number
                cycles = cycles or self._env.timeline_mark_cycles
                timeline.record(self._buffer, self._poke, cycles=cycles)
            case protocol.Tracing(number, False):
                if number == self._present:
                    timeline.stop()
                    self._buffer.end_all(timeline.now_ns())
            case protocol.TimelineAnswer():
                with self._answered:
                    self._answer = message
                    self._answered.notify_all()
                return True
            case protocol.TracesTaken() | protocol.ClockTold():
                pass
            case _:
                return False
        self._send_all(lambda: self._sending.receive(message, timeline.now_ns()))
        return True

    def due(self) -> None:
        if self._sending.timeline:
            self._send_all(lambda: self._sending.due(timeline.now_ns()))

    def close(self) -> None:
        if self._sending.timeline:
            timeline.stop()
            self._send_all(lambda: self._sending.rest(timeline.now_ns()))

    def _send_all(self, decide: Callable[[], list[Message]]) -> None:
        with self._lock:
            messages = decide()
            for message in messages:
                self._send(message)

    # ---- requests of the script

    def start(self, path: str, mark_cycles: bool) -> None:
        answer = self._ask(lambda number: protocol.TimelineWanted(number, path, mark_cycles))
        if answer.error:
            raise Invalid(f"start_timeline({path!r}) failed: {answer.error}")
        self._known = answer.timeline
        if answer.path != path:
            print(
                f"elastic: the timeline is written to {answer.path} instead of {path}, because an earlier"
                " request of this job set the path",
                file=sys.stderr,
            )

    def stop(self) -> None:
        number, self._known = self._known, 0
        if number:
            self._ask(lambda request: protocol.TimelineUnwanted(request, number))

    def _ask(self, question: Callable[[int], Message]) -> protocol.TimelineAnswer:
        with self._asking:
            self._requests += 1
            request = self._requests
            self._send(question(request))
            deadline = time.monotonic() + ANSWER_S
            with self._answered:
                while self._answer is None or self._answer.request != request:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._answered.wait(left):
                        raise DriverLost(
                            f"the driver did not answer a timeline request within {ANSWER_S:g} s: check that"
                            " elasticrun is still running"
                        )
                return self._answer


class TracingToFile:
    """Destination that writes records to a file of this rank, in a job without a driver."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._place = Place(0, 1, 0, 1, 0, 1)
        self._writing: _Writing | None = None

    def begin(self, place: Place) -> None:
        self._place = place
        path = self._env.timeline
        if path and path != DYNAMIC and self._writing is None:
            self.start(os.path.abspath(path), self._env.timeline_mark_cycles)

    def start(self, path: str, mark_cycles: bool) -> None:
        if self._writing is not None:
            if self._writing.path != path:
                raise Invalid(
                    f"start_timeline: a timeline is already being written to {self._writing.path}: call"
                    " stop_timeline() first"
                )
            return
        rank = self._place.rank
        self._writing = _Writing(path, rank)
        cycles = mark_cycles or self._env.timeline_mark_cycles
        timeline.record(self._writing.buffer, self._writing.poke, cycles=cycles)

    def stop(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            timeline.stop()
            writing.finish()

    def close(self) -> None:
        self.stop()

    def receive(self, message: Message) -> bool:
        return False

    def due(self) -> None:
        """Do nothing, because no driver receives messages."""


class _Writing:
    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self.buffer = TraceBuffer()
        self._file = TraceFile(path if rank == 0 else f"{path}.rank{rank}")
        self._format = TraceFormat(time.monotonic_ns(), time.time_ns() // 1000)
        self._key = f"rank {rank}"
        self._opening = [*self._format.opening(), *self._format.process(self._key, self._key, rank)]
        self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write, name="elastic-timeline", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        self._wake.set()

    def finish(self) -> None:
        """Write all records and close the file, waiting for the disk for at most CLOSE_S seconds."""
        self.buffer.end_all(time.monotonic_ns())
        self._over = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _write(self) -> None:
        try:
            self._file.append(self._opening)
            while not self._over:
                self._wake.wait(WRITE_S)
                self._wake.clear()
                self._append()
            self._append()
        except OSError as error:
            timeline.stop()
            print(f"elastic: the timeline {self.path} ends here: {error.strerror}", file=sys.stderr)
        self._file.close()

    def _append(self) -> None:
        self.buffer.report_open_spans(time.monotonic_ns())
        while len(self.buffer):
            self._file.append(self._format.records(self._key, self.buffer.take(BATCH)))
        dropped = self.buffer.take_dropped()
        if dropped:
            self._file.append(self._format.dropped(self._key, dropped, time.monotonic_ns()))


# ---- interface for scripts -----------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start writing a timeline of all workers to one file. The call returns when the file exists.

    One rank's call is enough. If several ranks call, the first call determines the file. HOROVOD_TIMELINE does not need
    to be set, not even to ``DYNAMIC``.

    Args:
        file_path: path of the file, on the driver's host under ``elasticrun``. A relative path is resolved against this
            worker's working directory.
        mark_cycles: whether to add an instant for every negotiation cycle.

    Raises:
        NotInitialized: (a ValueError) ``init()`` was not called.
        Invalid: (a ValueError) the file cannot be written.
        DriverLost: the driver does not respond.
    """
    tracing = context.current().tracing
    if not isinstance(file_path, str | os.PathLike) or not os.fspath(file_path):
        raise Invalid(f"start_timeline was given {file_path!r}: pass the path of a file")
    tracing.start(os.path.abspath(os.fspath(file_path)), bool(mark_cycles))


def stop_timeline() -> None:
    """Stop the current timeline. Its file is complete when the call returns.

    The first call of any worker ends the timeline of all workers. Later calls have no effect.

    Raises:
        NotInitialized: (a ValueError) ``init()`` was not called.
        DriverLost: the driver does not respond.
    """
    context.current().tracing.stop()


__all__ = ["start_timeline", "stop_timeline"]
