"""Recording of timelines: the trace records of all workers are collected in one file, which a separate thread writes.

    idle --open, or TimelineWanted--> recording: each worker receives Tracing(on), now or after its Hello
    recording --TimelineUnwanted--> ending: each worker receives Tracing(off), and sends its remaining records
    ending --TracedAll from each worker, or END_S expired--> idle; requests are answered

The event loop only queues records; `timeline` converts them to text. Errors while writing the file are logged once and
end the timeline, never the job. If records arrive faster than they can be written, they are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.events import Action, Event, PublishWorld
from elastic.driver.monitoring.job_view import JobView, ViewReader
from elastic.driver.monitoring.timeline import Timeline
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid
from elastic.protocol import messages
from elastic.protocol.messages import Message, Worker
from elastic.protocol.trace_file import TraceFile, is_free

# Timeout for workers to send their remaining records, in seconds. A frozen worker sends none.
END_S = 2.0
CLOSE_S = 10.0  # timeout for the last write, in seconds
WAITING_LIMIT = 500_000  # maximum number of records waiting to be written
AT_ONCE = 64  # maximum number of queued items combined into one write

Send = Callable[[Worker, Message], object]


@dataclass
class _Ending:
    """State of a timeline that is ending: the workers whose records are awaited, and pending requests."""

    awaited: set[Worker]
    asked: list[tuple[Worker, int]] = field(default_factory=list)
    wanted: list[tuple[Worker, messages.TimelineWanted]] = field(default_factory=list)
    alarm: asyncio.TimerHandle | None = None


class Tracing(ViewReader):
    """Recorder of the timelines of one job. All methods must be called in the event loop's thread."""

    def __init__(self, log: Log, view: JobView) -> None:
        self._log = log
        self._view = view
        self._send: Send = lambda worker, message: None
        self._workers: set[Worker] = set()  # connected workers
        self._number = 0  # sequence number of the newest timeline
        self._path = ""  # path of the current timeline's file, or empty if no timeline is recorded
        self._mark_cycles = False
        self._ending: _Ending | None = None
        self._waiting = 0  # number of records waiting to be written
        self._timeline = Timeline()
        self._writer: _Writer | None = None
        view.follow(self)

    def open(self, path: str, *, mark_cycles: bool = False) -> None:
        """Start recording a timeline to a file.

        Raises:
            Invalid: the file cannot be written.
        """
        file = TraceFile(path)
        self._number += 1
        self._path, self._mark_cycles = path, mark_cycles
        if self._writer is None:
            self._writer = _Writer(self._timeline, self._taken, self._failed)
        self._writer.begin(file, self._view.world)
        for worker in self._workers:
            self._announce(worker)

    def serve(self, send: Send) -> None:
        """Set the function that sends messages to workers. Must be called after the server has started."""
        self._send = send
        if self._writer is not None:
            self._writer.start()

    def happened(self, event: Event, actions: Sequence[Action], now: float) -> None:
        if self._writer is not None and self._path:
            now_ns, ranks = time.monotonic_ns(), self._view.ranks
            self._writer.put(lambda: self._timeline.noted(event, actions, now_ns, ranks))

    # ---- workers

    def handle(self, worker: Worker, message: Any) -> bool:
        """Handle a message from a worker. Return True if only this class uses such messages."""
        match message:
            case messages.ClockAsked(asked_ns):
                received_ns = time.monotonic_ns()
                self._send(worker, messages.ClockTold(asked_ns, received_ns, time.monotonic_ns()))
            case messages.Traced():
                self._traced(worker, message)
            case messages.TracedAll(number):
                self._complete(worker, number)
            case messages.TimelineWanted():
                self._wanted(worker, message)
            case messages.TimelineUnwanted(request, number):
                self._unwanted(worker, request, number)
            case messages.Hello() | messages.Reconnected():
                self._workers.add(worker)
                if self._path:
                    self._announce(worker)
                return False
            case _:
                return False
        return True

    def gone(self, worker: Worker) -> None:
        """Handle the loss of a worker's connection."""
        self._workers.discard(worker)
        self._complete(worker, self._number)

    def _announce(self, worker: Worker) -> None:
        self._send(worker, messages.Tracing(self._number, True, self._mark_cycles))

    def _traced(self, worker: Worker, message: messages.Traced) -> None:
        if message.timeline != self._number or not self._path or self._writer is None:
            return  # the message belongs to a previous timeline, which is no longer recorded
        if self._waiting > WAITING_LIMIT:
            lost = message.dropped + len(message.records)
            message = messages.Traced(message.timeline, message.offset_ns, [], lost)
        self._waiting += len(message.records)
        number, count, ranks = message.timeline, len(message.records), self._view.ranks
        self._writer.put(
            lambda: self._timeline.traced(worker, message, ranks), taken=(worker, number, count)
        )

    def _taken(self, worker: Worker, number: int, count: int) -> None:
        self._waiting -= count
        self._send(worker, messages.TracesTaken(number))

    def _failed(self, number: int, text: str) -> None:
        self._log("warning", text)
        if number == self._number and self._path:
            self._path = ""
            for worker in self._workers:
                self._send(worker, messages.Tracing(self._number, False))
            self._ended()

    # ---- start and stop

    def _wanted(self, worker: Worker, wanted: messages.TimelineWanted) -> None:
        if self._ending is not None:
            self._ending.wanted.append((worker, wanted))
            return
        error = ""
        if not self._path:
            try:
                if not os.path.isabs(wanted.path):
                    raise Invalid(
                        f"the timeline path {wanted.path!r} is relative: pass an absolute path"
                    )
                if os.path.isfile(wanted.path) and not is_free(wanted.path):
                    # The user who starts the job may overwrite any of their own files, but a worker on another host
                    # must not.
                    raise Invalid(
                        f"{wanted.path!r} already exists on the driver's host, but is not a timeline: remove the"
                        " file, or pass another path"
                    )
                self.open(wanted.path, mark_cycles=wanted.mark_cycles)
                self._log("info", f"{worker} started a timeline: {wanted.path}")
            except Invalid as refusal:
                error = str(refusal)
        elif self._path != wanted.path:
            self._log(
                "warning",
                f"{worker} requested a timeline in {wanted.path}, but the job already writes one to {self._path}",
            )
        answer = messages.TimelineAnswer(wanted.request, self._number, self._path, error)
        self._send(worker, answer)

    def _unwanted(self, worker: Worker, request: int, number: int) -> None:
        if number != self._number or (not self._path and self._ending is None):
            self._send(worker, messages.TimelineAnswer(request, self._number))
            return
        if self._ending is None:
            self._ending = _Ending(set(self._workers))
            loop = asyncio.get_running_loop()
            self._ending.alarm = loop.call_later(END_S, self._end)
            for each in self._workers:
                self._send(each, messages.Tracing(number, False))
        self._ending.asked.append((worker, request))

    def _complete(self, worker: Worker, number: int) -> None:
        if self._ending is not None and number == self._number:
            self._ending.awaited.discard(worker)
            if not self._ending.awaited:
                self._end()

    def _end(self) -> None:
        if not self._path:
            return  # the file is already being closed
        self._path = ""
        if self._writer is not None:
            self._writer.end(self._ended)

    def _ended(self) -> None:
        ending, self._ending = self._ending, None
        if ending is None:
            return
        if ending.alarm is not None:
            ending.alarm.cancel()
        for worker, request in ending.asked:
            self._send(worker, messages.TimelineAnswer(request, self._number))
        for worker, wanted in ending.wanted:
            self._wanted(worker, wanted)

    async def close(self) -> None:
        """Write the remaining records at the end of the job."""
        if self._ending is not None and self._ending.alarm is not None:
            self._ending.alarm.cancel()
        self._path = ""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)


class _Writer:
    """Thread that converts records to text and appends it to the current file."""

    def __init__(
        self,
        timeline: Timeline,
        taken: Callable[[Worker, int, int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._timeline = timeline
        self._taken = taken
        self._failed = failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._file: TraceFile | None = None
        self._number = 0  # sequence number of the file's timeline, see `Tracing`
        self._over = False
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def start(self) -> None:
        """Start the thread. Must be called in the event loop, in which the callbacks will run."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

    def begin(self, file: TraceFile, world: PublishWorld | None) -> None:
        now_ns, epoch_us = time.monotonic_ns(), time.time_ns() // 1000

        def opened() -> list[str]:
            self._number += 1
            self._file = file
            return self._timeline.begin(now_ns, epoch_us, world)

        self._jobs.put(_Job(opened, first=True))
        # If no event loop is running yet, `serve` starts the thread later.
        with contextlib.suppress(RuntimeError):
            self.start()

    def put(
        self, lines: Callable[[], list[str]], *, taken: tuple[Worker, int, int] | None = None
    ) -> None:
        """Queue lines for the file.

        Args:
            lines: function that returns the lines. It is called in the writer's thread.
            taken: the worker to notify when the lines have been written, the number of the timeline, and the number of
                records. None if no worker is to be notified.
        """
        self._jobs.put(_Job(lines, taken))

    def end(self, done: Callable[[], None] | None) -> None:
        """Close the current file after all queued lines have been written, then call ``done`` in the event loop."""
        now_ns = time.monotonic_ns()
        self._jobs.put(_Job(lambda: self._timeline.end(now_ns), done=done, last=True))

    def close(self) -> None:
        """Wait until all lines have been written, for at most CLOSE_S seconds."""
        if self._loop is None:
            return
        self.end(None)
        self._jobs.put(_Job(lambda: [], over=True))
        self._thread.join(CLOSE_S)

    # ---- in the thread

    def _run(self) -> None:
        while not self._over:
            jobs = [self._jobs.get()]
            with contextlib.suppress(queue.Empty):
                while len(jobs) < AT_ONCE and not jobs[-1].last:
                    jobs.append(self._jobs.get_nowait())
            lines: list[str] = []
            for job in jobs:
                if job.first:
                    self._append(lines)
                    lines = []
                lines += job.lines()
            self._append(lines)
            for job in jobs:
                self._over = self._over or job.over
                if job.taken is not None:
                    self._call(self._taken, *job.taken)
            if jobs[-1].last:
                if self._file is not None:
                    self._file.close()
                    self._file = None
                if jobs[-1].done is not None:
                    self._call(jobs[-1].done)

    def _append(self, lines: list[str]) -> None:
        if self._file is None:
            return
        try:
            self._file.append(lines)
        except OSError as error:
            text = f"the timeline {self._file.path} ends here: {error.strerror}"
            self._file.close()
            self._file = None
            self._call(self._failed, self._number, text)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            self._loop.call_soon_threadsafe(function, *arguments)


@dataclass
class _Job:
    """Item of the writer's queue."""

    lines: Callable[[], list[str]]
    taken: tuple[Worker, int, int] | None = None
    done: Callable[[], None] | None = None
    first: bool = False  # whether this is the first item for its file
    last: bool = False
    over: bool = False
