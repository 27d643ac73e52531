"""I/O of a driver, shared by all kinds of jobs: console, workers' output, metrics, timeline."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.driver.events import Action, Event, StopRequested, WorkerRaised
from elastic.driver.job.checkpoint_log_lines import kept_line
from elastic.driver.job.job import Job
from elastic.driver.job.operator_api.messages import PURPOSE
from elastic.driver.job.operator_api.operator_service import OperatorAccess, OperatorService
from elastic.driver.journal.entries import readable
from elastic.driver.monitoring.dashboard import page_server
from elastic.driver.monitoring.dashboard.live_page import LivePage
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.page_server import PageServer
from elastic.driver.monitoring.debounce_timer import DebounceTimer
from elastic.driver.monitoring.explain.report_at_job_end import RunReport
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.ongoing_failure import failure_lasts
from elastic.driver.monitoring.opentelemetry_traces import RecoveryTraces
from elastic.driver.monitoring.page_access import RequestGuard
from elastic.driver.monitoring.tensorboard_scalars import TensorBoard
from elastic.driver.monitoring.time_accounting import TimeSpent, summary
from elastic.driver.monitoring.timeline_collection import Tracing
from elastic.driver.network.secret import SECRET_BYTES, derived
from elastic.driver.output_interfaces import Log
from elastic.driver.processes.console import Console, is_terminal, write_both
from elastic.driver.processes.status_line import StatusLine, columns_of
from elastic.driver.processes.worker_output import Output
from elastic.errors import Invalid
from elastic.protocol.messages import Place, Worker
from elastic.protocol.report_values import Report

if TYPE_CHECKING:
    from elastic.driver.monitoring.prometheus_metrics import MetricsServer

STOPPED_S = 2.0  # seconds per stream for writing the remaining output after a stop

# Horovod's names of log levels, mapped to the levels of this program
_LEVELS = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARNING": "warning",
    "ERROR": "error",
    "FATAL": "error",
}


@dataclass
class JobIO:
    """I/O of one driver. ``place_of`` may be set later, when the membership exists."""

    view: JobView  # state of the job as shown to users, with times in seconds since 1970
    console: Console
    output: Output
    tracing: Tracing
    metrics: MetricsServer | None
    summary: bool  # whether to log a summary of how the time was spent at the end
    report: RunReport | None
    page: LivePage
    traces: RecoveryTraces | None
    tensorboard: TensorBoard | None
    desk: OperatorService
    place_of: Callable[[Worker], Place | None]

    level: str  # log level of the console
    line: Callable[[str], None] | None = (
        None  # function that shows the status line at the bottom of a terminal
    )
    # text of the exception that each worker has reported
    raised: dict[Worker, str] = field(default_factory=dict)
    # lock to hold while the view is modified
    changing: threading.Lock = field(default_factory=threading.Lock)
    # seconds to add to the journal's clock for the view's clock; None before the first event
    epoch: float | None = None
    unreported: bool = False  # whether the page of --report could not be written
    inherited: bool = False  # whether an earlier driver began the job
    # whether a signal stopped the job; the driver then does not wait for a slow reader of its output
    stopped: bool = False

    def forward_report(self, report: Report, reported: Callable[[Report], object] | None) -> None:
        """Forward a worker's report to the live page, the report file, the metrics and TensorBoard.

        Args:
            report: the report.
            reported: an additional function to call with the report, or None.
        """
        self.page.reported(report)
        if self.report is not None:
            self.report.report(report)
        if self.metrics is not None:
            self.metrics.report(report)
        if self.tensorboard is not None:
            self.tensorboard.report(report)
        if reported is not None:
            reported(report)

    def noted(self, event: Event, actions: Sequence[Action], now: float) -> None:
        """Record an event and its actions.

        Args:
            now: time on the journal's clock.
        """
        if isinstance(event, StopRequested):
            self.output.tracebacks.stopped = True
        if isinstance(event, WorkerRaised):
            self.raised[event.worker] = event.traceback
        if self.epoch is None:
            self.epoch = time.time() - now
        with self.changing:
            self.view.note(event, actions, self.epoch + now)
        self.page.changed()

    def adopted(
        self, workers: Mapping[Worker, tuple[int, int | None]], generation: int, *, prepares: bool
    ) -> None:
        """Record the workers of the previous driver. See `JobView.adopt`."""
        self.inherited = True
        with self.changing:
            self.view.adopt(workers, generation, time.time(), prepares=prepares)

    def unfolding(self) -> bool:
        """Return whether a failure is in progress. During a failure, summaries in the log are delayed."""
        return failure_lasts(self.view, self.output.sent)

    def log_remaining(self, *, last: bool = False) -> None:
        """Log the exceptions of workers that have not been logged yet.

        Args:
            last: whether no worker is left. If so, exceptions without a traceback are also logged, because a worker may
                have been killed after it reported an exception and before it wrote the traceback to stderr.
        """
        # Exceptions without a traceback: a worker that reports why the job cannot continue prints none.
        unsent = [
            f"{worker}: {text.rstrip()}"
            for worker, text in self.raised.items()
            if text and worker not in self.output.sent
        ]
        if last and unsent and not self.output.tracebacks.shown:
            self.console("error", unsent[0])
        for text in self.output.tracebacks.rest():
            self.console("error", text)

    def log_end(self, job: Job) -> None:
        """Log the remaining exceptions, and the checkpoint to resume from. Called after the last worker has exited."""
        self.log_remaining(last=True)
        if self.view.end is None or self.view.end.code == 0:
            return  # the job succeeded, or another driver continues it
        text = kept_line(
            self.view, writes=job.settings.durable, begins=job.begins, adopted=self.inherited
        )
        if text is not None:
            self.console("info", text)


@contextlib.contextmanager
def open_job_io(job: Job) -> Iterator[JobIO]:
    """Open the output of a job and log the notes about its start.

    Raises:
        Invalid: a setting is invalid, or a port is not available.
        OSError: a file cannot be opened.
    """
    found: list[JobIO] = []
    stdout, stderr = job.streams or write_both(sys.stdout, sys.stderr)
    status: StatusLine | None = None
    if job.streams is None and is_terminal(sys.stderr) and job.environ.get("TERM") != "dumb":
        status = StatusLine(stderr, lambda: columns_of(2))
        stdout, stderr = status.write if stdout == stderr else stdout, status.write
    view, changing = JobView(), threading.Lock()
    spent = TimeSpent(view)
    page = LivePage(
        PageModel(
            spent,
            name=job.name,
            command=readable(job.command),
            least=job.settings.workers_min,
            most=job.settings.workers_max,
            begins=job.begins,
        )
    )
    timer = DebounceTimer(
        lambda: found[0].log_remaining() if found else None,
        lambda: bool(found) and found[0].unfolding(),
    )
    output = Output(
        place_of=lambda worker: found[0].place_of(worker) if found else None,
        stdout=stdout,
        stderr=stderr,
        timestamps=job.prefix_timestamps,
        verbose=_LEVELS[job.log_level] == "debug",
        on_unlogged=timer.touch,
        asked=page.model.was_asked,
        folder=Path(job.output_dir) if job.output_dir else None,
        on_lines=page.printed,
    )
    level = _LEVELS[job.log_level]
    console = Console(
        output.write_line,
        level=level,
        colour=job.streams is None and is_terminal(sys.stderr),
        timestamps=job.log_timestamps,
        on_line=page.add_log_line,
    )
    metrics: MetricsServer | None = None
    wait_s: float | None = STOPPED_S  # also applies if an exception is raised
    try:
        for note_level, line in job.notes:
            console(note_level, line)
        tracing = Tracing(console, view)
        if job.settings.timeline is not None:
            tracing.open(job.settings.timeline)
            console("info", f"timeline: {job.settings.timeline}")
        if job.metrics is not None:
            # Import on demand, because the import takes a tenth of a second.
            from elastic.driver.monitoring.prometheus_metrics import JobMetrics, MetricsServer

            metrics = MetricsServer(*job.metrics, JobMetrics(spent), changing)
            host = f"[{job.metrics[0]}]" if ":" in job.metrics[0] else job.metrics[0]
            console("info", f"serving metrics at http://{host}:{metrics.port}/metrics")
        report = None
        if job.report is not None:
            report = RunReport(
                Path(job.report), job.command, job.settings, spent, begins=job.begins
            )
        traces = tensorboard = None
        if job.opentelemetry:
            traces = RecoveryTraces(job.name, job.environ, console)
            view.follow(traces)
        if job.tensorboard:
            tensorboard = TensorBoard(Path(job.tensorboard), console)
            view.follow(tensorboard)
        job_io = JobIO(
            *(view, console, output, tracing, metrics, job.summary, report, page),
            *(traces, tensorboard),
            operator_desk(job, page, console),
            lambda worker: None,
            level,
            _shown_by(status, output),
            changing=changing,
        )
        found.append(job_io)
        yield job_io
        if not found[0].stopped:
            wait_s = None
    finally:
        timer.cancel()
        if found:
            found[0].log_remaining()
        if found and found[0].summary:
            console("info", "\n".join(summary(spent)))
        if found and found[0].report is not None:
            found[0].unreported = not _write(found[0].report, console)
        if metrics is not None:
            metrics.close()
        if found and found[0].traces is not None:
            found[0].traces.close()
        if found and found[0].tensorboard is not None:
            found[0].tensorboard.close()
        page.close()
        with _ctrl_c_ends_it():
            output.close(STOPPED_S if _asked_to_end() else wait_s)


def _write(report: RunReport, log: Log) -> bool:
    """Write the report, and return whether this succeeded."""
    try:
        if report.write():
            log("info", f"report of this job: {report.file}")
    except Invalid as error:
        log("error", str(error))
        return False
    return True


def operator_desk(job: Job, page: LivePage, log: Log) -> OperatorService:
    """Create the service for operators of a job, without opening it."""
    secret = secrets.token_bytes(SECRET_BYTES) if job.fleet is None else job.fleet.secret
    key = derived(secret, PURPOSE)
    steering = OperatorAccess(
        name=job.name,
        key=key,
        command=readable(job.command),
        journal=job.journal or "",
        environ=job.environ,
        standby=job.fleet is not None and job.fleet.standby,
    )
    return OperatorService(steering, page, log)


def _shown_by(status: StatusLine | None, output: Output) -> Callable[[str], None] | None:
    if status is None:
        return None
    line = status
    # Write a space instead of an empty chunk, which would not be written.
    return lambda text: output.write_separately(line.show, text.encode(errors="replace") or b" ")


async def serve_page(job: Job, job_io: JobIO) -> None:
    """Serve the live page if requested, and log its link.

    Raises:
        Invalid: the server cannot listen on the address of the page.
    """
    if job.dashboard is None:
        await job_io.page.serve(None, job_io.line)
        return
    address, port = job.dashboard
    listening = page_server.bound(address, port)
    own, port = listening.getsockname()[:2]
    token = page_token(job)
    guard = RequestGuard(token, {"localhost", address.lower(), socket.gethostname().lower()})
    await job_io.page.serve(PageServer(job_io.page.model, listening, guard), job_io.line)
    host = socket.gethostname() if own in ("0.0.0.0", "::") else address
    host = f"[{host}]" if ":" in host else host
    job_io.console("info", f"page of this job: http://{host}:{port}/#{token}")


def page_token(job: Job) -> str:
    """Return the token that grants access to the live page.

    If the user specified the job's secret, the token is derived from the secret, so that it remains valid after a
    driver failover.
    """
    if job.fleet is None or not job.fleet.given_secret:
        return secrets.token_hex(16)
    return derived(job.fleet.secret, "dashboard").hex()[:32]


def _asked_to_end() -> bool:
    """Return whether Ctrl-C was pressed after the end of the job.

    In that case, asyncio has canceled this task, and raises KeyboardInterrupt when the task ends. On Python 3.10,
    asyncio raises KeyboardInterrupt immediately instead.
    """
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0


@contextlib.contextmanager
def _ctrl_c_ends_it() -> Iterator[None]:
    """Context manager in which Ctrl-C interrupts a blocking wait in this thread.

    asyncio's signal handler only cancels a task, which has no effect during the wait because no event loop is running.
    """
    unwanted = (None, signal.SIG_IGN, signal.SIG_DFL)
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) in unwanted:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
