"""Processor time of the driver's decisions in very large jobs, without processes, connections and waits.

    python benchmarks/driver_cost.py [--workers 16000 ...] [--slots 8] [--together 1] [--json FILE]

The events of all workers pass through what the driver's loop calls for each of them: `JobDecisions` with the real
membership, the journal in a file, and the view of the job with the live page. Messages between driver and agents are
not included. `control_plane.py` includes them, but needs a machine that can run thousands of agents.
"""

from __future__ import annotations

import itertools
import resource
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import results_output
import tests_on_path  # noqa: F401
from elastic.driver import events
from elastic.driver.job.decisions import JobDecisions
from elastic.driver.job.driver_loop import AT_ONCE
from elastic.driver.journal.file import FileJournal
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_spent import TimeSpent
from elastic.driver.settings import Settings
from elastic.protocol.messages import Address, Commit, Worker

MB = 1e6
BETWEEN_S = 1e-6  # seconds on the job's clock between two events


class Job:
    """A job as its driver knows it, on a clock of its own."""

    def __init__(self, workers: int, slots: int, folder: Path) -> None:
        self.settings = Settings(elastic=True, np=workers, workers_min=1, workers_max=workers)
        self.hosts = {f"h{number}": slots for number in range(workers // slots)}
        self.workers = [Worker(host, slot) for host in self.hosts for slot in range(slots)]
        self.membership = Membership(self.settings)
        self.generation = 0
        self._decisions = JobDecisions(self.membership, leave_s=self.settings.leave_s)
        self._file = folder / "journal"
        self._journal = FileJournal.begin(self._file, self.settings)
        self._view = JobView()
        PageModel(TimeSpent(self._view), name="", command=[], least=1, most=workers)
        self._now = 0.0
        self._readies = 0

    def journal_bytes(self) -> int:
        return self._file.stat().st_size

    def close(self) -> None:
        self._journal.close()

    def post(self, event: events.Event, *, more: bool = False) -> None:
        """Handle an event. ``more``: whether another event is queued, as in `Membership.handle`."""
        self._now += BETWEEN_S
        answer = self._decisions.answer(event, self._now, more=more)
        self._journal.record(self._now, event, answer, more=more)
        self._view.note(event, answer, self._now)
        self._decisions.follow(event, answer, self._now)
        self.generation = self.membership.generation

    def report(self, reports: Iterable[events.Event]) -> None:
        """Handle reports of all workers. They are queued faster than the driver handles them."""
        remaining = iter(reports)
        while batch := list(itertools.islice(remaining, AT_ONCE)):
            for event in batch[:-1]:
                self.post(event, more=True)
            self.post(batch[-1])

    def start(self) -> None:
        self.post(events.HostsChanged(self.hosts))
        self.report([events.WorkerConnected(worker, 1) for worker in self.workers])
        for _ in ("init", "elastic.run"):
            self.gather(None)
        self.resume()

    def lose(self, hosts: Iterable[str]) -> None:
        lost = set(hosts)
        for host in lost:
            self.post(events.HostLost(host, "silent"))
        self.workers = [worker for worker in self.workers if worker.host not in lost]

    def gather(self, commit: Commit | None) -> None:
        """Let all workers become ready, which publishes the next world."""
        generation, self._readies = self.generation, self._readies + 1
        store, running = Address("10.0.0.1", 29500), generation > 0
        self.report(
            events.WorkerReady(worker, generation, commit, store, "layout", running, self._readies)
            for worker in self.workers
        )
        assert self.generation == generation + 1, "not all workers are ready"

    def resume(self) -> None:
        phases = {"told": 1.0, "group": 20.0}
        self.report(
            events.WorkerResumed(worker, self.generation, phases) for worker in self.workers
        )


@dataclass
class Cost:
    """Processor time in seconds, and sizes in bytes."""

    workers: int
    hosts: int
    start_s: float = 0.0  # from the list of hosts until all train
    lost_s: float = 0.0  # first lost host, which ends the world
    each_more_s: float = 0.0  # each further host lost before the next world
    gathered_s: float = 0.0  # all survivors report ready, and the next world is published
    resumed_s: float = 0.0  # all survivors report that they train
    journal_bytes: int = 0  # growth of the journal at one loss
    snapshot_bytes: int = 0
    taken_s: float = 0.0
    restored_s: float = 0.0
    peak_bytes: int = 0  # peak memory of this process so far, before the snapshot


def measure(workers: int, slots: int, together: float) -> Cost:
    """Measure one size.

    Args:
        together: percentage of the hosts that are lost at once.
    """
    with tempfile.TemporaryDirectory(prefix="driver-cost-") as folder:
        job = Job(workers, slots, Path(folder))
        hosts = [*job.hosts]
        cost = Cost(len(job.workers), len(hosts))
        more = max(1, int(len(hosts) * together / 100))
        watch = Stopwatch()
        job.start()
        cost.start_s = watch.lap()
        before = job.journal_bytes()
        watch.lap()
        job.lose([hosts.pop()])
        cost.lost_s = watch.lap()
        job.lose([hosts.pop() for _ in range(more)])
        cost.each_more_s = watch.lap() / more
        job.gather(Commit(job.generation, 5))
        cost.gathered_s = watch.lap()
        job.resume()
        cost.resumed_s = watch.lap()
        cost.journal_bytes = job.journal_bytes() - before
        cost.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        watch.lap()
        data = take_snapshot(job.membership)
        cost.taken_s = watch.lap()
        restore_snapshot(data, job.settings)
        cost.restored_s = watch.lap()
        cost.snapshot_bytes = len(data)
        job.close()
        return cost


class Stopwatch:
    """Processor time of this process between two calls."""

    def __init__(self) -> None:
        self._at = time.process_time()

    def lap(self) -> float:
        before, self._at = self._at, time.process_time()
        return self._at - before


ROWS = {
    "hosts": lambda it: f"{it.hosts:,}",
    "start until all train, s": lambda it: f"{it.start_s:.2f}",
    "first lost host, ms": lambda it: f"{it.lost_s * 1e3:.1f}",
    "each further lost host, ms": lambda it: f"{it.each_more_s * 1e3:.2f}",
    "all are ready, next world, s": lambda it: f"{it.gathered_s:.2f}",
    "... per worker, us": lambda it: f"{it.gathered_s / it.workers * 1e6:.1f}",
    "all train again, s": lambda it: f"{it.resumed_s:.2f}",
    "journal of one loss, MB": lambda it: f"{it.journal_bytes / MB:.1f}",
    "peak memory before the snapshot, MB": lambda it: f"{it.peak_bytes / MB:.0f}",
    "snapshot, MB": lambda it: f"{it.snapshot_bytes / MB:.1f}",
    "... taken, s": lambda it: f"{it.taken_s:.2f}",
    "... restored, s": lambda it: f"{it.restored_s:.2f}",
}


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8000, 16000])
    parser.add_argument("--slots", type=int, default=8, help="workers of a host")
    parser.add_argument(
        "--together", type=float, default=1.0, help="percentage of hosts lost at once"
    )
    options = parser.parse_args()
    costs = [measure(size, options.slots, options.together) for size in options.workers]
    shown = results_output.table(
        "processor time of one driver's decisions", "", *(f"{it.workers:,} workers" for it in costs)
    )
    for name, cell in ROWS.items():
        shown.add_row(name, *map(cell, costs))
    console = results_output.console()
    console.print(shown)
    results_output.conclude(console, options.json, {"sizes": costs}, [])


if __name__ == "__main__":
    main()
