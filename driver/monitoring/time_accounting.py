"""Accounting of the time of a job and its workers, from the events and decisions in the journal.

Pure: no I/O, no clock.

A worker reports how it has spent its time since ``init()``. This module assigns the time that no report covers. The
time from a worker's start to ``init()`` counts as joining. The time from its last report to its exit counts for the
activity in that report. A worker that died cannot report how much of its training was lost. Its lost time is assumed to
equal that of the first survivor of its world that reports or, if all workers died, the training time since the newest
checkpoint. The parts of a worker always sum to the time from its start to its exit.

While training, a worker alternates between the parts of a step. The time since its last report is therefore divided
among these parts, in the proportions measured between two reports of this worker or of another.

Time in which the world stalled (see `stalls`) is counted as stalled instead of as training, waiting for data or lost,
both for workers and for the job.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from elastic.driver import events
from elastic.driver.monitoring.job_view import JobView, ViewReader
from elastic.driver.monitoring.stalls import Stall, Stalls
from elastic.protocol.messages import Part, Times, Worker

Stretch = Literal["starting", "training", "stalled", "recovering", "changing", "ending"]
STRETCHES: tuple[Stretch, ...] = (
    "starting",
    "training",
    "stalled",
    "recovering",
    "changing",
    "ending",
)
SHOWN = 32  # maximum number of workers listed in a summary
IN_STEPS: tuple[Part, ...] = ("training", "committing", "data")  # parts of each step
# Minimum interval, in seconds, between two reports from which proportions are computed. Shorter intervals are
# inaccurate.
MEASURED_S = 1.0
LEAST_S = 0.005  # Smaller values are omitted, because they would be displayed as 0.00.
# Number of exited workers listed individually. When twice as many are listed, the older half is aggregated.
KEPT = 100


class Seconds(Times):  # type: ignore[misc]  # a struct is as frozen as its base
    """Seconds that a worker spent on each part. Time in stalls is a separate part."""

    stalled: float = 0.0


PARTS: tuple[str, ...] = Seconds.__struct_fields__


@dataclass
class Spent:
    """Time that one worker has spent, in seconds on the driver's clock."""

    worker: Worker
    began: float
    ended: float | None = None
    reported: Times = field(default_factory=Times)
    reported_at: float | None = None
    doing: Part = "joining"
    generation: int = 0  # generation of the worker's last world
    joined: int = 0  # generation of the first world in which the worker took part
    trains_since: float | None = None  # time at which that world was published
    lost: float = 0.0  # seconds of lost training that the worker's reports do not contain
    # seconds in stalls, by the part in which the worker reported them
    stalled: dict[str, float] = field(default_factory=dict)
    stalled_last: float = 0.0  # seconds in stalls since the worker's last report in its last world
    # time up to which stalls were counted; inf while the worker is in no world
    stalled_to: float = math.inf
    # seconds spent on each part of a step between the last two reports that allowed a measurement
    steps: Mapping[str, float] | None = None

    def counts(self, report: Times, seconds: float) -> None:
        """Assign stalled time to the parts of a new report. `times` subtracts the assigned time from these parts.

        Lost time is reduced first, because no commits are made in a stall, and then the largest parts.

        Args:
            report: the new report of the worker.
            seconds: seconds of stall since the previous report.
        """
        if not seconds and not self.stalled:
            return
        before, after = msgspec.structs.asdict(self.reported), msgspec.structs.asdict(report)
        parts = {part: after[part] - before[part] for part in after}
        # A part decreases if the worker has returned to an earlier commit. Stalled time in that part then becomes lost
        # time.
        for part, more in parts.items():
            moved = min(self.stalled.get(part, 0.0), max(0.0, -more))
            if moved:
                self.stalled[part] -= moved
                self.stalled["lost"] = self.stalled.get("lost", 0.0) + moved
        most = sorted(parts, key=lambda each: (each != "lost", -parts[each]))
        for part in most:
            taken = min(seconds, max(0.0, parts[part]))
            if taken > 0:
                self.stalled[part] = self.stalled.get(part, 0.0) + taken
                seconds -= taken
        # Some of the stall precedes the worker's last report, which did not contain it yet.
        if seconds > 0:
            self.stalled[most[1]] = self.stalled.get(most[1], 0.0) + seconds

    def measured(self, report: Times, doing: Part) -> Mapping[str, float] | None:
        """Return the seconds that the worker spent on each part of a step since its last report.

        Returns None if the worker did not train during the whole interval, or if the interval is too short.
        """
        if self.reported_at is None or self.doing not in IN_STEPS or doing not in IN_STEPS:
            return None
        parts: dict[str, float] = {
            part: getattr(report, part) - getattr(self.reported, part) for part in IN_STEPS
        }
        return parts if min(parts.values()) >= 0 and sum(parts.values()) >= MEASURED_S else None

    def times(
        self, now: float, stalled_s: float = 0.0, steps: Mapping[str, float] | None = None
    ) -> Seconds:
        """Return the worker's seconds by part. They sum to the time since its start.

        Args:
            now: current time on the driver's clock.
            stalled_s: stalled seconds since the worker's last report.
            steps: result of `measured` for another worker, used if this worker has no measurement.
        """
        parts = msgspec.structs.asdict(self.reported)
        end = now if self.ended is None else self.ended
        known_to = self.trains_since if self.reported_at is None else self.reported_at
        doing: Part = "training" if self.reported_at is None else self.doing
        known_to = end if known_to is None else known_to
        parts["joining"] += max(0.0, known_to - self.began - sum(parts.values()))
        since = max(0.0, end - known_to)
        if doing in IN_STEPS:  # A worker in a stall remains in one part of a step.
            held = min(since, stalled_s + self.stalled_last)
            parts[doing] += held
            # commits take little time, so a worker that last reported "committing" has mostly trained since then
            rest = "training" if doing == "committing" else doing
            shares = self.steps or steps or {rest: 1.0}
            for part, share in shares.items():
                parts[part] += (since - held) * share / sum(shares.values())
        else:
            parts[doing] += since
        lost = min(self.lost, parts["training"])
        parts["training"] -= lost
        parts["lost"] += lost
        stalled = defaultdict[str, float](float, self.stalled)
        stalled[doing] += stalled_s
        # No commit was made during the worker's last stall, so lost time is taken from it first.
        again = min(lost, self.stalled_last, stalled[doing])
        stalled[doing] -= again
        stalled["lost"] += again
        return Seconds(**_less(parts, stalled))


def _less(parts: dict[str, float], stalled: Mapping[str, float]) -> dict[str, float]:
    found, rest = 0.0, 0.0
    for part, seconds in stalled.items():
        taken_s = min(seconds, max(0.0, parts[part]))
        parts[part] -= taken_s
        found, rest = found + taken_s, rest + seconds - taken_s
    if rest <= 0:
        return parts | {"stalled": found}
    for part in ["lost", *sorted(parts, key=lambda each: -parts[each])]:
        taken_s = min(rest, max(0.0, parts[part]))
        parts[part] -= taken_s
        found, rest = found + taken_s, rest - taken_s
    return parts | {"stalled": found}


class TimeSpent(ViewReader):
    """Accounting of the time of a job and its workers, from the observations of this driver."""

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.stalls = Stalls(view)
        self.running: dict[Worker, Spent] = {}
        self.gone: list[Spent] = []
        self.older = Seconds()  # sum over the exited workers that are no longer listed
        self.older_count = 0
        self.job: dict[Stretch, float] = dict.fromkeys(STRETCHES, 0.0)
        self.count: dict[Stretch, int] = dict.fromkeys(STRETCHES, 0)
        self.now = 0.0  # time of the latest event
        self._stretch: Stretch = "starting"
        self._since: float | None = None
        self._trained = False  # whether any worker has been in elastic.run
        # proportions of the parts of a step, from the last worker that reported them
        self._steps: Mapping[str, float] | None = None
        self._died: list[Spent] = []  # dead workers whose lost time is still unknown
        view.follow(self)

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        if self._since is None:
            self._since = now
        self.now = now
        for worker, known in self.view.exited.items():
            self._ended(worker, now, died=known.code != 0)
        match event:
            case events.WorkerSpent():
                self._record_report(event, now)
            case events.WorkerReady(worker, running=running):
                if worker in self.view.ranks and self._stretch == "training":
                    self._stop(now, first=running and not self.view.trains)
            case events.WorkersReady(workers, running=running) if self._stretch == "training":
                if not self.view.ranks.keys().isdisjoint(workers):
                    self._stop(now, first=running and not self.view.trains)
            case events.DriverRestarted():
                # The driver does not know when training began under the previous driver, so all time counts as
                # training.
                self._stretch = "starting" if self.view.prepares else "training"
            case _:
                pass

    def go_on(self, now: float) -> None:
        """Account for the time up to ``now`` without an event.

        Time after the end of the job and of all its workers is not counted.
        """
        if self._since is not None and not self.over:
            self.now = max(self.now, now)

    @property
    def over(self) -> bool:
        """Return whether the job and all its workers have ended, so that the times are final."""
        return self._stretch == "ending" and not self.running

    def decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.StartWorker(worker):
                self.running[worker] = Spent(worker, now)
            case events.BreakWorld():
                if self._stretch == "training":
                    self._begin("recovering", now)
            case events.PublishWorld(generation, holders=holders):
                view = self.view
                if not holders:
                    self._all_exited()
                for worker in view.before:
                    if worker not in view.ranks and worker in self.running:
                        self._left(self.running[worker], now)
                self._trained = self._trained or view.trains
                for spent in [self.running[w] for w in view.ranks if w in self.running]:
                    spent.generation = generation
                    spent.stalled_to = now if spent.stalled_to == math.inf else spent.stalled_to
                    if view.trains and not spent.joined:
                        spent.joined, spent.trains_since = generation, now
                if self._stretch == "starting":
                    self._begin("training", now)
            # As in the log, a recovery ends when all members train again.
            case events.ReportRecovery() if self._stretch in ("recovering", "changing"):
                self._begin("training", now)
            case events.EndJob():
                self._begin("ending", now)
            case _:
                pass

    def _stop(self, now: float, *, first: bool) -> None:
        """Record that a member waits for the next world.

        Args:
            now: current time, in seconds.
            first: whether the current world is a world of ``init()``, so that training has not begun.
        """
        if first:
            self._stretch = "starting"
        else:
            self._begin("changing", now)

    def _begin(self, stretch: Stretch, now: float) -> None:
        assert self._since is not None
        stalled = self._stalled_s(self._since, now)
        self.job[self._stretch] += now - self._since - stalled
        self.job["stalled"] += stalled
        self._stretch, self._since = stretch, now
        self.count[stretch] += 1

    def _record_report(self, event: events.WorkerSpent, now: float) -> None:
        spent = self.running.get(event.worker)
        if spent is None:
            if event.worker not in self.view.workers:
                return  # The report arrived after the driver had declared the worker's host lost.
            # The worker was started by a previous driver, so its start time is computed from its report.
            age = sum(msgspec.structs.astuple(event.times))
            spent = self.running[event.worker] = Spent(event.worker, now - age)
            spent.joined = spent.generation = event.generation
            if event.generation:  # A worker that waits for its first world has not trained.
                self._trained = True
                spent.stalled_to = spent.began
        self._count_stalls(spent, event.times, now)
        for dead in [*self._died]:
            if 0 < spent.joined <= dead.generation < event.generation:
                dead.lost = max(0.0, event.times.lost - spent.reported.lost)
                self._died.remove(dead)
        measured = spent.measured(event.times, event.doing)
        if measured is not None:
            spent.steps = self._steps = measured
        spent.reported, spent.reported_at, spent.doing = event.times, now, event.doing
        spent.stalled_last = 0.0

    def _count_stalls(self, spent: Spent, report: Times, now: float) -> None:
        if spent.stalled_to == math.inf:
            return
        spent.counts(report, self._stalled_s(spent.stalled_to, now))
        spent.stalled_to = self.stalls.undecided_since(now)

    def _left(self, spent: Spent, now: float) -> None:
        if spent.stalled_to < now:
            stalled = self._stalled_s(spent.stalled_to, now)
            part = "training" if spent.reported_at is None else spent.doing
            spent.stalled[part] = spent.stalled.get(part, 0.0) + stalled
            spent.stalled_last = stalled
        spent.stalled_to = math.inf

    def _stalled_s(self, since: float, now: float) -> float:
        return self.stalls.seconds(since, now, self.stalls.current(now))

    def _ended(self, worker: Worker, now: float, *, died: bool) -> None:
        spent = self.running.pop(worker, None)
        if spent is None:
            return
        self._left(spent, now)
        spent.ended = now
        self.gone.append(spent)
        if died and worker in self.view.ranks and self._stretch != "ending":
            self._died.append(spent)
        if len(self.gone) > 2 * KEPT:
            for old in self.gone[:KEPT]:
                self.older = _sum([self.older, old.times(now, steps=self._steps)])
            self.older_count += KEPT
            del self.gone[:KEPT]

    def _all_exited(self) -> None:
        """Compute the lost time of the dead workers, because all commits in memory are lost.

        Training is repeated from the newest checkpoint, or from the beginning if there is none.
        """
        for dead in self._died:
            assert dead.ended is not None
            made_at = self.view.checkpoint_at
            since = dead.began if made_at is None else made_at
            dead.lost = max(0.0, dead.ended - max(since, dead.began))
        self._died.clear()

    # ---- queries: up to the latest event ---------------------------------------------------------------------------

    def stretches(self) -> dict[Stretch, float]:
        """Return the job's seconds in each stretch. Their sum is the time since this driver's first event."""
        job = dict(self.job)
        if self._since is not None:
            stalled = self._stalled_s(self._since, self.now)
            job[self._stretch] += self.now - self._since - stalled
            job["stalled"] += stalled
        return job

    @property
    def stall(self) -> Stall | None:
        """Return the current stall, or None."""
        return self.stalls.current(self.now)

    def workers(self) -> list[tuple[Spent, Seconds]]:
        """Return the seconds by part of each individually listed worker, in the order of their starts."""
        ordered = sorted([*self.gone, *self.running.values()], key=lambda each: each.began)
        now, lasting = self.now, self.stall
        found: list[tuple[Spent, Seconds]] = []
        for spent in ordered:
            since = min(spent.stalled_to, now)
            stalled = self.stalls.seconds(since, now, lasting)
            found.append((spent, spent.times(now, stalled, self._steps)))
        return found

    def total(self) -> Seconds:
        """Return the seconds of all workers together, by part."""
        return _sum([self.older, *(times for _, times in self.workers())])

    def goodput(self) -> float | None:
        """Return the fraction of the workers' time that was spent on training.

        Returns None if no worker was in ``elastic.run``, because workers report their activity only there.
        """
        total = self.total()
        worked = sum(msgspec.structs.astuple(total))
        trained = self._trained or total.training > 0
        return total.training / worked if worked and trained else None


def _sum(each: Sequence[Seconds]) -> Seconds:
    return Seconds(*map(sum, zip(*map(msgspec.structs.astuple, each), strict=True)))


WORDS: dict[Stretch, str] = {
    "starting": "before training",
    "training": "training",
    "stalled": "stalled",
    "recovering": "recovering",
    "changing": "changing the world",
    "ending": "after training",
}


def summary(spent: TimeSpent, *, zeros: bool = True) -> list[str]:
    """Return a table of the time spent, as lines of text. It lists up to SHOWN workers.

    Args:
        spent: time of the job and its workers.
        zeros: whether to include stretches and parts of zero length.
    """
    job, total = spent.stretches(), spent.total()
    until = ", until the last worker exited" if spent.over else ""
    rows = [(str(each.worker), times) for each, times in spent.workers()]
    count = len(rows) + spent.older_count
    parts = [
        f"{WORDS[stretch]} {_seconds(job[stretch])} s{_often(spent.count[stretch], stretch)}"
        for stretch in STRETCHES
        if zeros or job[stretch] >= LEAST_S
    ]
    width = max([len("all workers"), *(len(name) for name, _ in rows[:SHOWN])])
    had = [name for name in PARTS if zeros or getattr(total, name) >= LEAST_S]
    lines = [
        f"time spent, {sum(job.values()):.1f} s{until}: {', '.join(parts)}",
        f"  {'seconds':<{width}}" + "".join(f"{name:>11}" for name in ("total", *had)),
        *(_row(name, width, times, had) for name, times in rows[:SHOWN]),
    ]
    if count > SHOWN:
        lines.append(f"  ... and {count - SHOWN} more")
    lines.append(_row("all workers", width, total, had))
    worked, goodput = sum(msgspec.structs.astuple(total)), spent.goodput()
    if goodput is not None:
        lines.append(
            f"  goodput {goodput:.3f}: {total.training:.1f} s of {worked:.1f} worker-seconds were spent on training"
            " that was not lost"
        )
    elif worked:
        lines.append(
            "  goodput unknown: no worker entered elastic.run, in which training time is measured"
        )
    return lines


def _seconds(value: float) -> str:
    # Two decimals are shown, because a recovery takes less than 0.1 s.
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _often(count: int, stretch: Stretch) -> str:
    if stretch not in ("recovering", "changing"):
        return ""
    return f" ({count} time{'' if count == 1 else 's'})"


def _row(name: str, width: int, times: Times, parts: Sequence[str]) -> str:
    values = [sum(msgspec.structs.astuple(times)), *(getattr(times, part) for part in parts)]
    return f"  {name:<{width}}" + "".join(f"{value:>11.2f}" for value in values)
