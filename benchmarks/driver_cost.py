"""Processor time of the driver's decisions in very large jobs, without processes, connections and waits.

    python benchmarks/driver_cost.py [--workers 16000 ...] [--slots 8] [--together 1] [--losses 0] [--times]
        [--json FILE]

The events of all workers pass through what the driver's loop calls for each of them: `JobDecisions` with the real
membership, the journal in a file, and the view of the job with the live page. Messages between driver and agents are
not included. `control_plane.py` includes them, but needs a machine that can run thousands of agents.

With ``--losses N``, a job with --resume then loses N hosts, one after the other, each of which is replaced. The driver
is killed when all workers train again after the last loss, but before the snapshot that is due then: at this moment,
another driver has most to replay. The next driver reads the journal from the page cache. With ``--times``, each worker
also reports how it has spent its time, as it does whenever its training begins.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import results_output
import tests_on_path  # noqa: F401
from elastic.driver import events
from elastic.driver.job.driver_loop import AT_ONCE
from elastic.driver.job.job_decisions import JobDecisions
from elastic.driver.journal.file_journal import FileArchive, FileJournal
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.journal.segment_files import older_segments
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.records.garbage_collection import uncollected
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.settings import Settings
from elastic.protocol.messages import Address, Commit, Times, Worker

MB = 1e6
PHASES = {"told": 1.0, "group": 20.0}  # milliseconds, of the worker in the first slot of a host
TIMES = Times(60.0, 1.5, 2.5, 0.0, 10.25, 5.125)
BETWEEN_S = 1e-6  # seconds on the job's clock between two events


class Job:
    """A job as its driver knows it, on a clock of its own."""

    def __init__(
        self,
        workers: int,
        slots: int,
        folder: Path,
        *,
        snapshots: bool = False,
        times: bool = False,
    ) -> None:
        self.settings = Settings(elastic=True, np=workers, workers_min=1, workers_max=workers)
        self.hosts = {f"h{number}": slots for number in range(workers // slots)}
        self.workers = [Worker(host, slot) for host in self.hosts for slot in range(slots)]
        self.joining: list[Worker] = []  # workers that are not members of a world yet
        self.membership = Membership(self.settings)
        self.generation = 0
        self._decisions = JobDecisions(self.membership, leave_s=self.settings.leave_s)
        self.file = folder / "journal"
        policy = SnapshotPolicy(take=lambda: take_snapshot(self.membership)) if snapshots else None
        self._journal = FileJournal.begin(self.file, self.settings, policy)
        self._view = JobView()
        PageModel(TimeSpent(self._view), name="", command=[], least=1, most=workers)
        self._now = 0.0
        self._readies = 0
        self._times = times  # whether workers report their times when their training begins

    def journal_bytes(self) -> int:
        return self.file.stat().st_size

    def close(self) -> None:
        self._journal.close()

    def rest(self) -> None:
        """Let the journal take a snapshot or begin a new segment if one is due, as an idle driver does."""
        asyncio.run(self._journal.rest())

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
            with uncollected():
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

    def replace(self, lost: str, name: str, slots: int) -> None:
        """Lose a host, and start workers on another host, which are ready before the next world is published."""
        self.lose([lost])
        self.hosts = {host: count for host, count in self.hosts.items() if host != lost}
        self.hosts[name] = slots
        self.post(events.HostsChanged(self.hosts))
        self.joining = [Worker(name, slot) for slot in range(slots)]
        self.report([events.WorkerConnected(worker, 1) for worker in self.joining])
        self.gather(Commit(self.generation, 5))
        self.workers += self.joining
        self.joining = []
        self.resume()

    def gather(self, commit: Commit | None) -> None:
        """Let all workers become ready, which publishes the next world."""
        generation, self._readies = self.generation, self._readies + 1
        store, running = Address("10.0.0.1", 29500), generation > 0
        self.report(
            events.WorkerReady(worker, 0, None, store, "layout", True, 1) for worker in self.joining
        )
        if commit is None:
            # The workers are in init(), or have just entered elastic.run: no world has ended.
            self.report(
                events.WorkerReady(
                    worker, generation, commit, store, "layout", running, self._readies
                )
                for worker in self.workers
            )
        else:
            self.report(
                events.WorkersReady(
                    workers,
                    [29500 + worker.slot for worker in workers],
                    *(generation, commit, "10.0.0.1", "layout", running, self._readies),
                )
                for workers in self._by_host()
            )
        assert self.generation == generation + 1, "not all workers are ready"

    def resume(self) -> None:
        self.report(
            events.WorkersResumed(
                workers,
                self.generation,
                {phase: [ms + worker.slot for worker in workers] for phase, ms in PHASES.items()},
            )
            for workers in self._by_host()
        )
        if self._times:
            self.report(
                events.WorkerSpent(worker, self.generation, TIMES, "training")
                for worker in self.workers
            )

    def _by_host(self) -> Iterator[list[Worker]]:
        """Yield the workers of each host, whose reports the host's agent merges."""
        return (list(group) for _, group in itertools.groupby(self.workers, lambda it: it.host))


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
    losses: int = 0  # losses of the second job, or 0 if there was none
    current_bytes: int = 0  # its journal, without older segments
    kept_bytes: int = 0  # older segments
    written_bytes: int = 0  # size of its journal if no segment had been deleted
    stops_s: float = (
        0.0  # longest time for which the driver stopped for a snapshot or a new segment
    )
    replayed: int = 0  # entries that the next driver has replayed
    adopted_s: float = 0.0  # wall time until it has the state of the job
    adopting_s: float = 0.0  # processor time for this


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


def lose_many(cost: Cost, workers: int, slots: int, losses: int, *, times: bool) -> None:
    """Measure the journal of a job after many losses, and its adoption by another driver."""
    with tempfile.TemporaryDirectory(prefix="driver-cost-") as folder:
        job = Job(workers, slots, Path(folder), snapshots=True, times=times)
        job.start()
        for number in range(losses):
            watch = Stopwatch()
            job.rest()
            cost.stops_s = max(cost.stops_s, watch.lap())
            size = job.journal_bytes()
            job.replace(next(iter(job.hosts)), f"r{number}", slots)
            cost.written_bytes += job.journal_bytes() - size
        known = job.membership.generation
        job.close()
        cost.losses = losses
        cost.current_bytes = job.journal_bytes()
        cost.kept_bytes = sum(each.stat().st_size for each in older_segments(job.file).values())
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as drivers:
            found = drivers.submit(adopt, job.file).result()
        generation, cost.replayed, cost.adopted_s, cost.adopting_s = found
        assert generation == known


def adopt(file: Path) -> tuple[int, int, float, float]:
    """Adopt a job as its next driver, which is a process of its own.

    Return its generation, the number of replayed entries, and the seconds of wall time and of processor time.
    """
    before, watch = time.perf_counter(), Stopwatch()
    archive = FileArchive(file)
    past = asyncio.run(archive.past())
    adopted_s, adopting_s = time.perf_counter() - before, watch.lap()
    archive.close()
    assert past is not None
    return past.membership.generation, past.replayed, adopted_s, adopting_s


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
AFTER_LOSSES = {
    "losses": lambda it: f"{it.losses:,}",
    "entries written, MB": lambda it: f"{it.written_bytes / MB:,.0f}",
    "journal, MB": lambda it: f"{it.current_bytes / MB:.0f}",
    "older segments, MB": lambda it: f"{it.kept_bytes / MB:.0f}",
    "largest snapshot with its segment, s": lambda it: f"{it.stops_s:.2f}",
    "entries replayed by the next driver": lambda it: f"{it.replayed:,}",
    "next driver has the state after, s": lambda it: f"{it.adopted_s:.2f}",
    "... processor time, s": lambda it: f"{it.adopting_s:.2f}",
}


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8000, 16000])
    parser.add_argument("--slots", type=int, default=8, help="workers of a host")
    parser.add_argument(
        "--together", type=float, default=1.0, help="percentage of hosts lost at once"
    )
    parser.add_argument(
        "--losses", type=int, default=0, help="number of hosts that a job loses before its adoption"
    )
    parser.add_argument(
        "--times", action="store_true", help="workers report their times after each loss"
    )
    options = parser.parse_args()
    costs = [measure(size, options.slots, options.together) for size in options.workers]
    shown = results_output.table(
        "processor time of one driver's decisions", "", *(f"{it.workers:,} workers" for it in costs)
    )
    if options.losses:
        for cost in costs:
            lose_many(cost, cost.workers, options.slots, options.losses, times=options.times)
    for name, cell in (ROWS | (AFTER_LOSSES if options.losses else {})).items():
        shown.add_row(name, *map(cell, costs))
    console = results_output.console()
    console.print(shown)
    results_output.conclude(console, options.json, {"sizes": costs}, [])


if __name__ == "__main__":
    main()
