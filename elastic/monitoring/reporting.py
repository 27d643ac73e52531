"""`report`: what a script says of its training, to whoever has started the job. Acts; `report_queue` decides."""

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

CLOSE_S = 3.0  # at the process's end, for the driver to take what is left


def report(metrics: Mapping[str, Any]) -> None:
    """Sends metrics to the driver: ``elastic.report({"loss": loss, "step": state.step})``.

    Values are None, bool, int, float, str, and lists and dicts of them; a tensor or an array of one element becomes its
    number, for which a GPU is waited for. They come out at ``elastic.launch(..., on_report=...)``, in the order in
    which this worker reported them, and the last of each rank is kept. Nothing is decided by them.

    Never waits for the driver. While there is none, or it is slow, the last 1000 reports are kept and sent later; how
    many older ones had to be dropped is said in the log. Without a driver it does nothing.

    Raises NotInitialized before ``init()``, TypeError for any other value, with its key, and Invalid (a ValueError) for
    more than 64 KiB.
    """
    rt = context.current()
    body = packed(metrics)
    if rt.reporting is not None:
        rt.reporting.add(rt.generation, rt.place, body)


class Reporting:
    """Of one worker. ``send`` must not raise. Any thread may call."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._queue = ReportQueue()
        self._changed = threading.Condition()  # around the queue; nothing blocks under it
        self._sending = threading.Lock()  # one at a time, in order
        self._lost = False

    def add(self, generation: int, place: Place, metrics: bytes) -> None:
        with self._changed:
            self._queue.add(generation, place, time.time(), metrics)
        self._send_all()

    def receive(self, message: Message) -> bool:
        """In the link's thread. Whether this message was about reports."""
        if not isinstance(message, messages.ReportsTaken):
            return False
        with self._changed:
            self._queue.taken(message.number)
            self._changed.notify_all()
        self._send_all()
        return True

    def say_again(self) -> None:
        """There is another driver, or another connection to it."""
        with self._changed:
            self._queue.say_again()
        self._send_all()

    def driver_lost(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def settle(self) -> int:
        """Waits until the driver has everything, within a bound. How many it has not taken."""
        deadline = time.monotonic() + CLOSE_S
        with self._changed:
            while (left := len(self._queue)) and not self._lost:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            return 0 if self._lost else left

    def close(self) -> None:
        """At exit."""
        left = self.settle()
        if left:
            print(
                f"elastic: the last {left} reports were not received within {CLOSE_S:g} s: no driver",
                file=sys.stderr,
            )

    def _send_all(self) -> None:
        """Who finds another sending leaves it to that one, which looks once more when it is done."""
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
