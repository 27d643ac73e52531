"""Record of the received reports of workers. It detects repetitions and determines which acknowledgements are due.

Pure: no I/O, no clock.

A worker numbers its reports and repeats those that may have been lost. See `elastic.monitoring.report_queue`.
"""

from __future__ import annotations

from collections.abc import Container

from elastic.protocol.messages import Reported, ReportsTaken, Worker

# Reports of a worker are acknowledged immediately once this many bytes are unacknowledged: a quarter of its send
# window.
PRESSING_BYTES = 32 * 1024
OVERHEAD_BYTES = 100


class ReportLedger:
    """Record of the reports that one driver has received and acknowledged."""

    def __init__(self) -> None:
        self._taken: dict[Worker, int] = {}  # number of the last accepted report of each worker
        # number of unacknowledged bytes of each worker
        self._unacknowledged: dict[Worker, int] = {}
        # number of reports that each worker has dropped since this dict was last cleared
        self.dropped: dict[Worker, int] = {}

    def record(self, worker: Worker, report: Reported) -> bool:
        """Record a report. Return whether it is the worker's next report, which must be processed.

        A worker repeats an accepted report if the acknowledgement was lost. After a gap, the worker sends all missing
        reports again.
        """
        expected = max(self._taken.get(worker, 0) + 1, report.oldest)
        if report.number > expected:
            return False
        self._unacknowledged[worker] = (
            self._unacknowledged.get(worker, 0) + len(report.metrics) + OVERHEAD_BYTES
        )
        if report.number < expected:
            return False
        self._taken[worker] = report.number
        if report.dropped:
            self.dropped[worker] = self.dropped.get(worker, 0) + report.dropped
        return True

    def pressing(self, worker: Worker) -> bool:
        """Return whether a worker needs an acknowledgement before it can send more reports."""
        return self._unacknowledged.get(worker, 0) >= PRESSING_BYTES

    def answers(self) -> list[tuple[Worker, ReportsTaken]]:
        """Return the acknowledgements that are due, as pairs of worker and message, ordered by host."""
        pending, self._unacknowledged = self._unacknowledged, {}
        return [(worker, ReportsTaken(self._taken.get(worker, 0))) for worker in sorted(pending)]

    def answer(self, worker: Worker) -> ReportsTaken:
        """Return the acknowledgement for one worker."""
        del self._unacknowledged[worker]
        return ReportsTaken(self._taken.get(worker, 0))

    def keep(self, workers: Container[Worker]) -> None:
        """Discard the state of all workers except the given ones."""
        for known in (self._taken, self._unacknowledged):
            for worker in [each for each in known if each not in workers]:
                del known[worker]
