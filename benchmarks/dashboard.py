"""Cost of the live page for the driver: a real driver, lightweight agents, and viewers that read everything.

    python benchmarks/dashboard.py [--workers 1000] [--viewers 10] [--idle-s 20] [--losses 3] [--json FILE]

The same job runs twice: without a page, and with it and its viewers. It measures the driver's CPU time during training,
its memory, and, for hosts that are lost one after the other, the time from the decision in the journal until each
viewer has it.

Limits for 1,000 workers and 10 viewers, compared with a job without the page: 1 % of a core and 20 MB; a change is
shown within 200 ms.
"""

from __future__ import annotations

import os
import selectors
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import results_output
import tests_on_path  # noqa: F401
from measurements import Mark
from stress.load.agents import Lose, Together
from stress.load.job import LightJob

CORE, MEMORY_MB, SHOWN_S = 0.01, 20.0, 0.2  # limits


@dataclass
class PageFigures:
    """Results of one job.

    Args:
        shown_s: for each loss, the time until the last viewer received it.
    """

    core: float = 0.0  # share of one core during training
    peak_mb: float = 0.0
    shown_s: list[float] = field(default_factory=list)
    sent_kb_per_s: float = 0.0  # rate to one viewer


class Viewers:
    """Connections to the page that read everything, in a thread."""

    def __init__(self, link: str, count: int) -> None:
        self.bytes = 0
        self._heard: dict[bytes, dict[int, float]] = {}  # time of the first receipt, by viewer
        self._selector = selectors.DefaultSelector()
        self._over = False
        for _ in range(count):
            to = urlsplit(link)
            viewer = socket.create_connection((to.hostname, to.port or 80))
            ask = (
                f"GET /events HTTP/1.1\r\nHost: {to.netloc}\r\nAuthorization: Bearer {to.fragment}"
            )
            viewer.sendall(f"{ask}\r\n\r\n".encode())
            self._selector.register(viewer, selectors.EVENT_READ)
        self.count = count
        threading.Thread(target=self._read, daemon=True).start()

    def expect(self, text: bytes) -> None:
        """Record the receipt of this text from now on."""
        self._heard[text] = {}

    def until(self, text: bytes, timeout_s: float = 20.0) -> float:
        """Wait until all viewers have received an expected text and return the time on the machine's monotonic
        clock.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._heard[text]) < self.count:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"only {len(self._heard[text])} of {self.count} viewers received {text!r}"
                )
            time.sleep(0.001)
        return max(self._heard[text].values())

    def close(self) -> None:
        self._over = True

    def _read(self) -> None:
        rests: dict[int, bytes] = {}
        while not self._over:
            for key, _ in self._selector.select(0.2):
                viewer = key.fileobj
                assert isinstance(viewer, socket.socket)
                data = viewer.recv(1 << 20)
                if not data:
                    self._selector.unregister(viewer)
                    continue
                now = time.monotonic()
                self.bytes += len(data)
                text = rests.get(viewer.fileno(), b"") + data
                for wanted, received in [*self._heard.items()]:
                    if wanted in text:
                        received.setdefault(viewer.fileno(), now)
                rests[viewer.fileno()] = text[text.rfind(b"\n") + 1 :]


def measure(workers: int, viewers: int, losses: int, idle_s: float) -> PageFigures:
    """Measure one job; with ``viewers`` 0 it has no page."""
    figures = PageFigures()
    if viewers:
        os.environ["ELASTIC_DASHBOARD"] = ":0"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dashboard-") as folder,
            LightJob(workers, 8, Path(folder)) as job,
        ):
            job.wait(Together, lambda it: it.size == workers)
            watching = Viewers(job.page_link() if viewers else "", viewers)
            time.sleep(3.0)
            spent, began, sent = job.cpu_s(), time.monotonic(), watching.bytes
            time.sleep(idle_s)
            over_s = time.monotonic() - began
            figures.core = (job.cpu_s() - spent) / over_s
            if viewers:
                figures.sent_kb_per_s = (watching.bytes - sent) / over_s / viewers / 1e3
            for host in [*job.hosts][-losses:] if losses else []:
                # The decision that follows from the loss contains the host's name.
                text = f"lost host {host}".encode()
                watching.expect(text)
                job.order(Lose(host))
                job.wait(Together)
                if viewers:
                    figures.shown_s.append(watching.until(text) - job.lost_at(host))
                time.sleep(1.0)
            figures.peak_mb = job.peak_mb()
            watching.close()
    finally:
        os.environ.pop("ELASTIC_DASHBOARD", None)
    return figures


def marks_of(without: PageFigures, page: PageFigures) -> list[Mark]:
    return [
        Mark("the page, of a core", CORE, page.core - without.core),
        Mark("the page's memory, MB", MEMORY_MB, page.peak_mb - without.peak_mb),
        Mark("until a change is on all pages, s", SHOWN_S, max(page.shown_s, default=0.0)),
    ]


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--losses", type=int, default=3, help="hosts that are lost")
    parser.add_argument("--idle-s", type=float, default=20.0, help="how long the load is looked at")
    options = parser.parse_args()
    without = measure(options.workers, 0, options.losses, options.idle_s)
    page = measure(options.workers, options.viewers, options.losses, options.idle_s)
    title = f"{options.workers:,} workers, {options.viewers} viewers"
    table = results_output.table(title, "", "without a page", "with it")
    table.add_row("while all train, of a core", f"{without.core:.2%}", f"{page.core:.2%}")
    table.add_row("driver's memory, MB", f"{without.peak_mb:.1f}", f"{page.peak_mb:.1f}")
    table.add_row("sent to a viewer, KB/s", "", f"{page.sent_kb_per_s:.1f}")
    lost_ms = ", ".join(f"{1e3 * each:.0f}" for each in page.shown_s)
    table.add_row("a lost host on all pages, ms", "", lost_ms)
    console, marks = results_output.console(), marks_of(without, page)
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f}")
    results_output.conclude(console, options.json, {"without": without, "page": page}, marks)


if __name__ == "__main__":
    main()
