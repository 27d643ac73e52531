"""Follows a running job, and writes a report page at its end. Acts: reads the clock, writes a file."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.driver.events import Action, Event
from elastic.driver.monitoring.explain.findings import JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.page import PageJob, page
from elastic.driver.monitoring.explain.reported_series import ReportedSeries
from elastic.driver.monitoring.explain.worker_rows import WorkerRows
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Worker
from elastic.protocol.report_values import Report


class RunReport:
    """Report of one job, as seen by this driver."""

    def __init__(self, file: Path, command: Sequence[str], settings: Settings) -> None:
        self.file = file
        self._command = shlex.join(command)
        self._settings = settings
        self._story = JobHistory()
        self._rows = WorkerRows()
        self._reported = ReportedSeries()
        self._offset: float | None = None
        self._left: tuple[Mapping[Worker, int | None], int] | None = None

    def note(self, event: Event, actions: Sequence[Action], now: float) -> None:
        """Record an event and its actions; ``now`` on the journal's clock."""
        if self._offset is None:
            self._offset = time.time() - now
            if self._left is not None:
                ranks, generation = self._left
                members = [(worker, rank) for worker, rank in ranks.items() if rank is not None]
                self._story.adopt(members, generation, now)
                self._rows.adopt(members, generation, now)
        self._story.note(event, actions, now)
        self._rows.note(event, actions, now)

    def adopt(self, ranks: Mapping[Worker, int | None], generation: int) -> None:
        """Adopt the workers of the previous driver. Must be called first."""
        self._left = ranks, generation

    def report(self, report: Report) -> None:
        """Record a report of a worker."""
        self._reported.report(report.rank, report.metrics, report.at)

    def write(self) -> None:
        """Write the page. Raises Invalid."""
        state = JournalState(self._settings, runs=False, from_the_middle=self._left is not None)
        found = findings(self._story, state)
        job = PageJob(self._story, self._rows, found, self._command, self._offset, self._reported)
        write_page(self.file, page(job))


def write_page(file: Path, text: str) -> None:
    """Write a file atomically. Raises Invalid."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        unfinished.write_bytes(text.encode(errors="backslashreplace"))
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise Invalid(f"cannot write {str(file)!r}: {error.strerror}: pass another file") from error
