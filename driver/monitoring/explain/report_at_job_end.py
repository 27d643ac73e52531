"""Report page about a job, written by its driver when the job ends. Performs I/O."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from elastic.driver.monitoring.explain.findings import JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.report_page import PageJob, page
from elastic.driver.monitoring.explain.timeline_rows import WorkerRows
from elastic.driver.monitoring.job_view import ViewReader
from elastic.driver.monitoring.reported_series import ReportedSeries
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.settings import Settings, StartCheckpoint
from elastic.errors import Invalid
from elastic.protocol.report_values import Report

BEGINNING = "<!doctype html>"  # text with which every report page begins


class RunReport(ViewReader):
    """Report on one job, based on this driver's observations.

    The times of ``spent`` and of its view must be in seconds since 1970.
    """

    def __init__(
        self,
        file: Path,
        command: Sequence[str],
        settings: Settings,
        spent: TimeSpent,
        *,
        begins: StartCheckpoint | None = None,
    ) -> None:
        self.file = file
        self._command = shlex.join(command)
        self._settings = settings
        self._story = JobHistory(spent, begins)
        self._rows = WorkerRows(spent.view)
        self._reported = ReportedSeries()
        self._from_the_middle = False
        spent.view.follow(self)

    def adopted(self, now: float) -> None:
        self._from_the_middle = True

    def report(self, report: Report) -> None:
        """Record a worker's report."""
        self._reported.report(report.rank, report.metrics, report.at)

    def write(self) -> bool:
        """Write the report page.

        Returns:
            True if the report was written. False if the job was refused at its start; an earlier report is then kept.

        Raises:
            Invalid: the file exists and is not a report, or cannot be written.
        """
        if self._story.began is None:
            return False
        state = JournalState(self._settings, runs=False, from_the_middle=self._from_the_middle)
        found = findings(self._story, state)
        job = PageJob(self._story, self._rows, found, self._command, 0.0, self._reported)
        write_page(self.file, page(job))
        return True


def check_replaceable(file: Path, beginning: str) -> None:
    """Raise Invalid if the path is a device or a file of another kind, such as a script or a journal.

    This prevents a report or animation from overwriting such a file.

    Args:
        file: path of the new file.
        beginning: the first characters of the new file, which identify its kind.
    """
    if file.is_dir() or not file.exists():
        return
    trouble = "it is a device, a pipe or a socket"
    if file.is_file():
        with contextlib.suppress(OSError), open(file, "rb") as existing:
            if existing.read(len(beginning)) in (b"", beginning.encode()):
                return
        trouble = "the file exists and is not a report"
    raise Invalid(f"the report {str(file)!r} can't be written: {trouble}. Pass another file")


def write_page(file: Path, text: str) -> None:
    """Write a page atomically. Only an earlier file of the same kind may be replaced.

    Raises:
        Invalid: the file exists and is of another kind, or cannot be written.
    """
    check_replaceable(file, text[: len(BEGINNING)])
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        unfinished.write_bytes(text.encode(errors="backslashreplace"))
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise Invalid(
            f"the report {str(file)!r} can't be written: {error.strerror}. Pass another file"
        ) from error
