"""Faults of a DiLoCo job on two hosts with a slow link between them, and their cost for the survivors.

The job has agents, a driver and etcd, which are on the same side of the link as host b. Workers are killed, all workers
of a host are killed, or the link is cut. A survivor's stall is the time between the two inner steps around the change
of the world, compared with its median inner step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

import results_output
import tests_on_path  # noqa: F401
from harness.waiting import wait_until
from measurements import Mark, spread
from stress.hosts import steps
from stress.hosts.cluster import HostCluster, HostedJob

HOSTS = ("a", "b")
PLACES = {"a": "behind the link", "b": "beside the driver"}
WORKER, RANK_0, ISLAND, CUT = KINDS = ("a worker", "rank 0", "an island", "the link was cut")
JOIN = "a worker joins"
CUT_S = 30.0
JOIN_S = 90.0  # seconds for a new worker to train
PACE_S = 10.0  # between two kills in `goodput`
STALL_MS = 100.0  # limit of a stall, in addition to an inner step
STEPPER = Path(__file__).with_name("diloco_stepper.py")


@dataclass(frozen=True)
class Fault:
    """``at``: seconds on the machine's monotonic clock."""

    what: str
    at: float


@dataclass(frozen=True)
class Stall:
    """A change of the world for a worker that trained before and after it, in milliseconds."""

    what: str  # the fault, or that a worker joined
    host: str
    size: int  # of the next world
    stalled_ms: float  # between the two inner steps around it
    step_ms: float  # median of the worker's inner steps


@dataclass(frozen=True)
class FaultedTraining:
    """Results of a job.

    Args:
        lost: inner steps that survivors had committed, and that a recovery undid.
        merges: number of merges.
        differing: number of merges after which the outer parameters differed between workers.
        goodput: share of the time of all workers, from their first to their last step, that was not lost in stalls.
    """

    stalls: list[Stall]
    lost: int
    merges: int
    differing: int
    goodput: float


class DiLoCoJob(HostedJob):
    options: dict[str, Any]

    def command(self) -> list[str]:
        return [sys.executable, str(STEPPER), str(self.folder), json.dumps(self.options)]

    def live(self) -> list[tuple[str, int]]:
        """Return host and process ID of the workers that have committed a step."""
        found = []
        for path in self._notes():
            host, _, pid = path.name.partition(".")
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 0)
                found.append((host, int(pid)))
        training = {path.name for path in (self.folder / "rounds").iterdir()}
        return [(host, pid) for host, pid in found if f"{host}.{pid}" in training]

    def rounds(self) -> dict[int, list[dict[str, Any]]]:
        """Return the records of rounds, by process ID."""
        return {
            int(path.name.partition(".")[2]): [
                json.loads(line) for line in path.read_text().split("\n")[:-1]
            ]
            for path in (self.folder / "rounds").iterdir()
        }

    def leader_of_the_world(self) -> int:
        """Return the process ID of rank 0."""
        live = {pid for _, pid in self.live()}
        entries = [
            (each["at"], pid)
            for pid, records in self.rounds().items()
            for each in records
            if pid in live and each["what"] == "entered" and each["rank"] == 0
        ]
        return max(entries)[1]

    def newest(self) -> int:
        return max((note.step for _, note in self._latest()), default=0)


@contextlib.contextmanager
def job_on(
    limit: Callable[[HostCluster], None], workers: int, options: dict[str, Any]
) -> Iterator[tuple[HostCluster, DiLoCoJob]]:
    """Context of a job on two hosts, which trains with all workers.

    Args:
        limit: limits the link between the hosts.
        workers: of each host.
        options: arguments of `elastic.DiLoCo`.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-") as text, HostCluster(Path(text)) as bench:
        limit(bench)
        bench.start_etcd()
        folder = Path(text) / "job"
        for name in ("steps", "rounds"):
            (folder / name).mkdir(parents=True)
        job = DiLoCoJob(bench, "faults", "faults", folder, HOSTS, workers)
        job.options = options | {"islands": workers > 1}
        try:
            job.start()
            yield bench, job
        finally:
            for program in job.programs:
                program.end()


def kill_in_turns(
    limit: Callable[[HostCluster], None],
    workers: int,
    options: dict[str, Any],
    kills: int,
    seed: int,
) -> FaultedTraining:
    """Kill workers, each time that all have trained for a while. With islands, also rank 0, islands and the link."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    with job_on(limit, workers, options) as (bench, job):
        everyone = [*HOSTS] * workers
        for kill in range(kills):
            what = KINDS[kill % 3] if workers > 1 else WORKER
            host = HOSTS[kill // 3 % 2 if workers > 1 else kill % 2]
            last = job.newest() + chance.randrange(options["every"] // 2, 2 * options["every"])
            wait_until(partial(_has_step, job, last), f"inner step {last}", JOIN_S)
            victims = [(where, pid) for where, pid in job.live() if where == host]
            if what == RANK_0:
                zero = job.leader_of_the_world()
                victims = [each for each in job.live() if each[1] == zero]
            elif what == WORKER:
                victims = [chance.choice(victims)]
            left = Counter(everyone) - Counter(where for where, _ in victims)
            faults.append(Fault(what, time.monotonic()))
            for _, pid in victims:
                os.kill(pid, signal.SIGKILL)
            job.trains(left.elements(), after=faults[-1].at, timeout=JOIN_S)
            job.trains(everyone, timeout=JOIN_S)
        if workers > 1:
            faults.append(Fault(CUT, bench.network.cut(HOSTS[0])))
            job.trains([HOSTS[1]] * workers, after=faults[-1].at, timeout=JOIN_S)
            time.sleep(max(0.0, faults[-1].at + CUT_S - time.monotonic()))
            bench.network.heal(HOSTS[0])
            limit(bench)
            job.trains(everyone, timeout=JOIN_S)
        return result_of(job.workers(), faults, job.rounds().values(), len(everyone))


def kill_at_intervals(
    limit: Callable[[HostCluster], None],
    workers: int,
    options: dict[str, Any],
    kills: int,
    seed: int,
) -> FaultedTraining:
    """Kill a random worker each `PACE_S` seconds, whether or not the previous one has been replaced."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    with job_on(limit, workers, options) as (_, job):
        began = time.monotonic()
        for kill in range(kills):
            time.sleep(max(0.0, began + (kill + 1) * PACE_S - time.monotonic()))
            live = job.live()
            if len(live) > 1:
                faults.append(Fault(WORKER, time.monotonic()))
                os.kill(chance.choice(live)[1], signal.SIGKILL)
        job.trains([*HOSTS] * workers, timeout=JOIN_S)
        return result_of(job.workers(), faults, job.rounds().values(), len(HOSTS) * workers)


def _has_step(job: DiLoCoJob, step: int) -> bool:
    return job.newest() >= step


# ---- evaluation, pure ----------------------------------------------------------------------------


def result_of(
    workers: Sequence[steps.WorkerNotes],
    faults: Sequence[Fault],
    rounds: Iterable[Sequence[dict[str, Any]]],
    size: int,
) -> FaultedTraining:
    """Evaluate a job of ``size`` workers by the notes and records of its processes."""
    stalls = [each for worker in workers for each in stalls_of(worker, faults, size)]
    digests = defaultdict(set)
    lost = 0
    for records in rounds:
        lost += sum(each["lost"] for each in records if each["what"] == "entered")
        for each in records:
            if each["what"] == "merged":
                digests[each["merges"]].add(each["digest"])
    differing = sum(len(found) > 1 for found in digests.values())
    return FaultedTraining(stalls, lost, len(digests), differing, goodput_of(workers, stalls))


def goodput_of(workers: Sequence[steps.WorkerNotes], stalls: Sequence[Stall]) -> float:
    commits = [worker.commits() for worker in workers]
    total = sum(each[-1].at - each[0].at for each in commits if each)
    lost = sum(max(0.0, each.stalled_ms - each.step_ms) for each in stalls) / 1e3
    return 1.0 - lost / total if total else 0.0


def stalls_of(worker: steps.WorkerNotes, faults: Sequence[Fault], size: int) -> list[Stall]:
    """Return the stalls of one process in a job of ``size`` workers."""
    commits = worker.commits()
    gaps = [1e3 * (b.at - a.at) for a, b in pairwise(commits)]
    if not gaps:
        return []
    median = statistics.median(gaps)
    entered = [note for note in worker.notes if note.kind == steps.ENTERED]
    found = []
    for before, after in pairwise(commits):
        between = [note for note in entered if before.at < note.at < after.at]
        if between:
            earlier = [each.what for each in faults if each.at < after.at]
            what = earlier[-1] if earlier and between[-1].size < size else JOIN
            stalled = 1e3 * (after.at - before.at)
            found.append(Stall(what, worker.host, between[-1].size, stalled, median))
    return found


def fault_marks(found: FaultedTraining) -> list[Mark]:
    marks = [
        Mark("inner steps that survivors had committed and lost", 0, found.lost),
        Mark("merges with different outer parameters", 0, found.differing),
    ]
    for what in KINDS:
        for host in HOSTS:
            more = [
                each.stalled_ms - each.step_ms
                for each in found.stalls
                if (each.what, each.host) == (what, host)
            ]
            if more:
                place = f"stall of survivors {PLACES[host]} minus their inner step"
                marks.append(Mark(f"{place}, {what}, longest, ms", STALL_MS, max(more)))
    return marks


def stall_table(stalls: Sequence[Stall], title: str) -> Table:
    headings = ("number", "stall, ms", "longest", "inner step, ms", "longest minus step")
    found = results_output.table(title, "", "", *headings)
    for what in (*KINDS, JOIN):
        for host in HOSTS:
            chosen = [each for each in stalls if (each.what, each.host) == (what, host)]
            if chosen:
                times = [each.stalled_ms for each in chosen]
                step = statistics.median(each.step_ms for each in chosen)
                more = max(each.stalled_ms - each.step_ms for each in chosen)
                cells = [spread(times).text(0), f"{max(times):.0f}", f"{step:.0f}", f"{more:.0f}"]
                found.add_row(what, PLACES[host], str(len(chosen)), *cells)
    return found
