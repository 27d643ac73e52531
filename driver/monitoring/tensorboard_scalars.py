"""TensorBoard scalars of workers' reports, recoveries and world sizes.

A separate thread writes the scalars with tensorboardX. The driver therefore never waits for the disk, but scalars that
cannot be written in time are lost.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from elastic.driver.events import Action, Event, PublishWorld, ReportRecovery
from elastic.driver.monitoring.job_view import ViewReader
from elastic.driver.monitoring.reported_series import STEP
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid
from elastic.protocol.report_values import Report

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

INSTALL = "pip install 'hvd-elastic[tensorboard]'"
MOST = 10_000  # maximum number of scalars waiting to be written
FLUSH_S = 2.0
CLOSE_S = 3.0  # timeout for writing the remaining scalars when a job ends, in seconds
# Folder for the driver's own measurements. The values of each rank are written to a separate folder.
JOB = "job"


class Scalar(NamedTuple):
    """One point of a curve in TensorBoard.

    Args:
        run: name of the subfolder that contains the curve's file.
        at: time of the point, in seconds since 1970.
    """

    run: str
    tag: str
    value: float
    step: int
    at: float


class ScalarsOfReports:
    """Converter of a job's reports to TensorBoard scalars. Pure: no I/O, no clock."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # number of reports received from each rank

    def of(self, report: Report) -> list[Scalar]:
        """Convert a worker's report to scalars. Numbers in nested dicts are named ``outer/inner``.

        The step of each scalar is the value reported as ``step``, or otherwise the number of reports from this rank.
        """
        count = self._counts[report.rank] = self._counts.get(report.rank, -1) + 1
        reported_step = report.metrics.get(STEP)
        step = (
            int(reported_step)
            if _is_number(reported_step) and math.isfinite(reported_step)
            else count
        )
        run = f"rank-{report.rank}"
        return [
            Scalar(run, tag, float(value), step, report.at)
            for tag, value in _numbers(report.metrics)
        ]


def of_actions(actions: Sequence[Action], at: float) -> list[Scalar]:
    """Convert the driver's actions to scalars. The step of each scalar is the generation number."""
    found = []
    for action in actions:
        if isinstance(action, PublishWorld):
            size = float(len(action.members))
            found.append(Scalar(JOB, "elastic/workers", size, action.generation, at))
        elif isinstance(action, ReportRecovery):
            tag = f"elastic/{action.kind}_ms"
            found.append(Scalar(JOB, tag, action.total_ms, action.generation, at))
    return found


def _numbers(metrics: Mapping[str, Any], above: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in metrics.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{above}{name}/")
        elif _is_number(value):
            found.append((f"{above}{name}", value))
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class TensorBoard(ViewReader):
    """Writer of TensorBoard scalars to subfolders of ``folder``.

    Raises:
        Invalid: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise Invalid(f"--tensorboard needs the writer tensorboardX: {INSTALL}")
        self._folder = folder
        self._log = log
        self._warned = False
        self._reports = ScalarsOfReports()
        self._writers: dict[str, EventsWriter] = {}
        self._waiting: queue.Queue[Scalar | None] = queue.Queue(MOST)
        self._trouble = ""
        self._writing = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._writing.start()

    def report(self, report: Report) -> None:
        self._give(self._reports.of(report))

    def happened(self, event: Event, actions: Sequence[Action], now: float) -> None:
        self._give(of_actions(actions, now))

    def close(self) -> None:
        """Write the remaining scalars, for at most CLOSE_S seconds."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._writing.join(CLOSE_S)
        self._log_trouble()

    def _give(self, scalars: Sequence[Scalar]) -> None:
        for each in scalars:
            try:
                self._waiting.put_nowait(each)
            except queue.Full:
                self._trouble = self._trouble or "they arrive faster than they can be written"
        self._log_trouble()

    def _log_trouble(self) -> None:
        if self._trouble and not self._warned:
            self._warned = True
            text = f"scalars for TensorBoard are lost (logged once): {self._trouble}"
            self._log("warning", text)

    def _write(self) -> None:
        flush_at: float | None = None  # time of the next flush, or None if nothing is pending
        while True:
            try:
                left_s = None if flush_at is None else max(0.0, flush_at - time.monotonic())
                scalar = self._waiting.get(timeout=left_s)
            except queue.Empty:
                flush_at = None
                self._guarded(self._flush)
                continue
            if scalar is None:
                self._guarded(self._end)
                return
            self._guarded(self._add, scalar)
            flush_at = flush_at or time.monotonic() + FLUSH_S

    def _guarded(self, act: Any, *arguments: Any) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self._trouble = self._trouble or str(error)

    def _add(self, scalar: Scalar) -> None:
        # The import takes seconds, so it is done in this thread instead of the driver's.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        writer = self._writers.get(scalar.run)
        if writer is None:
            folder = self._folder / scalar.run
            folder.mkdir(parents=True, exist_ok=True)
            writer = self._writers[scalar.run] = EventsWriter(str(folder / "events"))
        point = summary.scalar(scalar.tag, scalar.value)
        writer.write_event(Event(wall_time=scalar.at, step=scalar.step, summary=point))

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _end(self) -> None:
        for writer in self._writers.values():
            writer.close()
