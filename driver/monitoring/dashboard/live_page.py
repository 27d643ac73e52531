"""Live page of a running job, which updates its model and optionally serves it. `page_model` contains the logic.

Events must be passed in the event loop's thread, log lines in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.page_server import PageServer
from elastic.driver.monitoring.dashboard.page_state import Patch
from elastic.driver.monitoring.dashboard.status_line_text import one_line
from elastic.driver.monitoring.dashboard.worker_grid import slot_of
from elastic.driver.output_interfaces import Stream, Usage
from elastic.protocol.messages import Worker
from elastic.protocol.report_values import Report

LINE_S = 0.5  # interval between two updates of the status line, in seconds


class LivePage:
    """Live page of one job: its model, status line and HTTP server."""

    def __init__(self, model: PageModel) -> None:
        self.model = model
        self._server: PageServer | None = None
        self._thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: Callable[[str], None] | None = None
        self._line_shown = ""
        self._next_line: asyncio.TimerHandle | None = None

    async def serve(
        self, server: PageServer | None, line: Callable[[str], None] | None = None
    ) -> None:
        """Start updating the page, and serve it if a server is given.

        Args:
            server: server of the page, or None to update the model without serving it.
            line: callback that receives the job's state as one line at regular intervals, and an empty string at the
                end.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._server = server
        self._line = line
        if line is not None:
            self._show_line()
        if server is not None:
            await server.open()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def whole(self) -> Patch:
        """Return the whole state of the page as one patch."""
        return self.model.full(time.time())

    def members(self) -> list[Worker]:
        """Return the running members of the current world in rank order."""
        view = self.model.view
        return [worker for worker in view.ranks if worker in view.workers]

    def worker_of(self, name: str) -> Worker | None:
        """Return the worker with the given rank or in the given slot.

        Args:
            name: rank such as ``3``, slot such as ``host:0``, or one incarnation of a slot's worker such as
                ``host:0#2``.
        """
        slot, _, start = name.partition("#")
        for key, row in self.model.worker_rows().items():
            same = slot == key or (name.isdecimal() and row["rank"] == int(name))
            if same and start in ("", str(row["start"])):
                return Worker(row["host"], row["slot"], row["start"])
        return None

    def stack_of(self, worker: Worker) -> str:
        """Return the most recent stack dump of a worker."""
        row = self.model.state.tables["stacks"].get(slot_of(worker))
        return row["text"] if row is not None else ""

    def close(self) -> None:
        if self._next_line is not None:
            self._next_line.cancel()
        if self._line is not None:
            self._line("")
            self._line = None
        if self._server is not None:
            self._server.close()
            self._server = None

    # ---- updates ---------------------------------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        self.model.report(report.rank, report.metrics, time.time())
        self.changed()

    def add_log_line(self, level: str, text: str) -> None:
        """Add a line of the driver's log to the page."""
        self._in_loop(level, "", text.splitlines() or [""])

    def printed(self, worker: Worker, label: str, stream: Stream, pieces: Sequence[bytes]) -> None:
        """Add lines of a worker's output to the page.

        Args:
            worker: the worker.
            label: name of the worker, shown before each line.
            stream: stdout or stderr.
            pieces: consecutive chunks of the output. A chunk may end in the middle of a line.
        """
        if stream == "usage":
            for piece in pieces:
                self.model.uses(worker, msgspec.json.decode(piece, type=Usage), time.time())
            self.changed()
            return
        if stream != "stdout" and self.model.expects_stack(worker):
            for piece in pieces:
                self.model.stderr(worker, _text(piece), time.time())
        now = time.time()
        for index, piece in enumerate(pieces if stream != "diagnostics" else ()):
            if not self.model.has_room(now):
                self.model.leave_out(len(pieces) - index)
                break
            if text := _text(piece):
                self.model.line(stream, label, text, now)
        self.changed()

    def _show_line(self) -> None:
        assert self._loop is not None and self._line is not None
        self.model.go_on(time.time())
        if (text := one_line(self.model.state)) != self._line_shown:
            self._line_shown = text
            self._line(text)
        self._next_line = self._loop.call_later(LINE_S, self._show_line)

    def _in_loop(self, level: str, label: str, lines: Sequence[str]) -> None:
        if threading.get_ident() != self._thread:
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the event loop is already closed
                    self._loop.call_soon_threadsafe(self._in_loop, level, label, lines)
            return
        for line in lines:
            self.model.line(level, label, line, time.time())
        self.changed()

    def changed(self) -> None:
        """Schedule sending the pending changes to the viewers."""
        if self._server is not None:
            self._server.changed()


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace").rstrip("\r\n")
