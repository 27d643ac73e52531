"""`report`: sends metrics from the script to the process that started the job."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic import context
from elastic.monitoring.report_queue import ReportQueue
from elastic.protocol import messages
from elastic.protocol.messages import Message, Place
from elastic.protocol.report_values import Report, packed

CLOSE_S = 3.0  # timeout in seconds, at exit, for the driver to accept the remaining reports


def report(metrics: Mapping[str, Any]) -> None:
    """Send metrics to the driver, as in ``elastic.report({"loss": loss, "step": state.step})``.

    Values may be None, bool, int, float, str, and lists and dicts of these. A tensor or an array of one element is
    converted to a number, which synchronizes with its GPU. ``elastic.launch(..., on_report=...)`` receives the metrics
    in the order in which this worker reported them, and the last report of each rank is kept. Reports do not influence
    the job.

    The call never waits for the driver. If the driver is unreachable or slow, the last 1000 reports are kept and sent
    later. The log shows how many older reports were dropped. Without a driver, the call has no effect.

    Raises:
        NotInitialized: ``init()`` was not called.
        TypeError: a value has another type; the message names its key.
        Invalid: (a ValueError) the metrics are larger than 64 KiB.
    """
    rt = context.current()
    body = packed(metrics)
    if rt.reporting is not None:
        rt.reporting.add(rt.generation, rt.place, body)


class Reporting:
    """Sender of the reports of one worker. ``send`` must not raise. Thread-safe."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._queue = ReportQueue()
        self._changed = threading.Condition()  # guards the queue; held only for short operations
        # lock that allows only one thread at a time to send, which preserves the order
        self._sending = threading.Lock()
        self._lost = False

    def add(self, generation: int, place: Place, metrics: bytes) -> None:
        with self._changed:
            self._queue.add(generation, place, time.time(), metrics)
        self._send_all()

    def receive(self, message: Message) -> bool:
        """Handle a message in the link thread, and return whether it was about reports."""
        if not isinstance(message, messages.ReportsTaken):
            return False
        with self._changed:
            self._queue.taken(message.number)
            self._changed.notify_all()
        self._send_all()
        return True

    def resend(self) -> None:
        """Send unacknowledged reports again, after a change of the driver or of the connection."""
        with self._changed:
            self._queue.resend()
        self._send_all()

    def driver_lost(self) -> None:
        """Stop sending, because the driver is lost."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def settle(self) -> int:
        """Wait, for a bounded time, until the driver has received all reports. Return the number of missing reports."""
        deadline = time.monotonic() + CLOSE_S
        with self._changed:
            while (left := len(self._queue)) and not self._lost:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            return 0 if self._lost else left

    def close(self) -> None:
        """Send the remaining reports at exit, and stop."""
        left = self.settle()
        if left:
            print(
                f"elastic: no driver received the last {left} reports within {CLOSE_S:g} s",
                file=sys.stderr,
            )

    def _send_all(self) -> None:
        while self._due() and self._sending.acquire(blocking=False):
            try:
                while (message := self._next()) is not None:
                    self._send(message)
            finally:
                self._sending.release()

    def _due(self) -> bool:
        with self._changed:
            return self._queue.due and not self._lost

    def _next(self) -> messages.Reported | None:
        with self._changed:
            return self._queue.next()


__all__ = ["Report", "Reporting", "report"]
