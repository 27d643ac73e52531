"""Decides which of the workers' reports are new, and which workers are to be told that theirs are taken. Pure.

A worker numbers its reports and says them again when something may have been lost; see
`elastic.monitoring.report_queue`.
"""

from __future__ import annotations

from collections.abc import Container

from elastic.protocol.messages import Reported, ReportsTaken, Worker

PRESSING_BYTES = 32 * 1024  # a quarter of what a worker has under way: it is told at once
OVERHEAD_BYTES = 100


class ReportLedger:
    """Of one driver."""

    def __init__(self) -> None:
        self._taken: dict[Worker, int] = {}  # the last number
        self._untold: dict[Worker, int] = {}  # bytes, of who has not been told
        self.dropped: dict[Worker, int] = {}  # reports that found no room, since somebody looked

    def heard(self, worker: Worker, said: Reported) -> bool:
        """Whether it is the next one. One that was taken comes again where our answer was lost; one that comes too
        early has lost some before it, and all will come again.
        """
        following = max(self._taken.get(worker, 0) + 1, said.oldest)
        if said.number > following:
            return False
        self._untold[worker] = self._untold.get(worker, 0) + len(said.metrics) + OVERHEAD_BYTES
        if said.number < following:
            return False
        self._taken[worker] = said.number
        if said.dropped:
            self.dropped[worker] = self.dropped.get(worker, 0) + said.dropped
        return True

    def pressing(self, worker: Worker) -> bool:
        """Whether this worker waits for an answer before it can send more."""
        return self._untold.get(worker, 0) >= PRESSING_BYTES

    def answers(self) -> list[tuple[Worker, ReportsTaken]]:
        """Whom to tell what, by host."""
        untold, self._untold = self._untold, {}
        return [(worker, ReportsTaken(self._taken.get(worker, 0))) for worker in sorted(untold)]

    def answer(self, worker: Worker) -> ReportsTaken:
        """The same, to one."""
        del self._untold[worker]
        return ReportsTaken(self._taken.get(worker, 0))

    def keep(self, workers: Container[Worker]) -> None:
        """Nothing will be heard of the others."""
        for known in (self._taken, self._untold):
            for worker in [each for each in known if each not in workers]:
                del known[worker]
