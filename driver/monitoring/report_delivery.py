"""Delivery of workers' reports to a callback, and acknowledgement to the workers.

`report_acknowledgements` detects repetitions. The callback runs in the event loop's thread, so it blocks the driver
while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic.driver.monitoring.report_acknowledgements import ReportLedger
from elastic.driver.output_interfaces import Log
from elastic.protocol.messages import Message, Place, Reported, Worker
from elastic.protocol.report_values import Report, unpacked

ANSWER_S = 0.05  # maximum delay of an acknowledgement, in seconds
DROPPED_LOG_S = 30.0  # minimum interval between two log lines about dropped reports, in seconds
SHOWN = 200  # maximum number of characters of a report that are logged

Callback = Callable[[Report], object]
SendEach = Callable[[Iterable[tuple[Worker, Message]]], object]


class Reports:
    """Receiver of the reports of one job's workers. All methods must be called in the event loop's thread."""

    def __init__(self, reported: Callback | None, log: Log) -> None:
        self._reported = reported
        self._log = log
        self._send_each: SendEach = lambda messages: None
        self._ledger = ReportLedger()
        self._last: dict[Worker, Report] = {}
        self._answering: asyncio.TimerHandle | None = None
        self._raised = False  # whether an exception raised by the callback was already logged
        # hosts from which an invalid report was received and logged
        self._strange: set[str] = set()
        self._dropped_logged_at = float("-inf")

    def serve(self, send_each: SendEach) -> None:
        """Set the function that sends messages to workers. Called after the server has started."""
        self._send_each = send_each

    def handle(self, worker: Worker, message: Any) -> bool:
        """Handle a message from a worker. Return whether it was a report."""
        if not isinstance(message, Reported):
            return False
        if self._ledger.record(worker, message):
            self._take(worker, message)
        self._answer_soon(worker)
        return True

    def by_rank(self, places: Mapping[Worker, Place]) -> dict[int, Report]:
        """Return the last report of each of these workers, by rank. Workers without a report are omitted."""
        ranks = {place.rank: worker for worker, place in places.items() if worker in self._last}
        return {rank: self._last[ranks[rank]] for rank in sorted(ranks)}

    def keep(self, workers: set[Worker]) -> None:
        """Discard the state of all workers except the given ones."""
        self._ledger.keep(workers)
        for worker in self._last.keys() - workers:
            del self._last[worker]

    def close(self) -> None:
        """Stop sending acknowledgements, and log the dropped reports that were not logged yet."""
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None
        self._log_dropped(always=True)

    def _take(self, worker: Worker, message: Reported) -> None:
        try:
            report = unpacked(worker, message)
        except ValueError as error:
            if worker.host not in self._strange:
                self._strange.add(worker.host)
                self._log("warning", f"{worker} sent an invalid report: {error}")
            return
        self._last[worker] = report
        shown = str(report.metrics)
        more = "..." if len(shown) > SHOWN else ""
        self._log("debug", f"rank {report.rank} ({worker}) reported {shown[:SHOWN]}{more}")
        if self._reported is None:
            return
        try:
            self._reported(report)
        except Exception as error:
            if not self._raised:
                self._raised = True
                words, _, _ = f"{type(error).__name__}: {error}".partition("\n")
                self._log(
                    "error",
                    f"the callback for reports raised {words} (logged once); the job continues",
                )

    def _answer_soon(self, worker: Worker) -> None:
        if self._ledger.pressing(worker):
            self._send_each([(worker, self._ledger.answer(worker))])
        elif self._answering is None:
            loop = asyncio.get_running_loop()
            self._answering = loop.call_later(ANSWER_S, self._answer)

    def _answer(self) -> None:
        self._answering = None
        self._send_each(self._ledger.answers())
        self._log_dropped()

    def _log_dropped(self, *, always: bool = False) -> None:
        """Log dropped reports: the first ones immediately, later ones combined into one line per interval."""
        dropped = self._ledger.dropped
        if not dropped:
            return
        now = asyncio.get_running_loop().time()
        if always or now - self._dropped_logged_at >= DROPPED_LOG_S:
            count, workers = sum(dropped.values()), len(dropped)
            senders = str(next(iter(dropped))) if workers == 1 else f"{workers} workers"
            self._log(
                "warning",
                f"the oldest {count} reports of {senders} were dropped: too many arrived at once, or no driver was"
                " connected",
            )
            self._dropped_logged_at = now
            dropped.clear()
