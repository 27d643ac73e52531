"""Evaluate a job's journal and the faults injected into it: recoveries, lost steps, goodput. Pure: no I/O, no clock.

Terms:

- A commit is *lost* if a world continued from an older commit although a member of that world held the newer one. This
  must never happen.
- A commit is *gone with its holders* if every worker that held it has died. No worker could continue from it, so its
  steps were repeated, as was all work since the last commit (*done again*, in seconds).
- *Training* is the time in which a whole world trained and its work was kept. In each world, it begins when every
  member has completed its first collective. It ends at the last commit before the world fails, at a planned change, or
  at the end of training.
- *Goodput* is the training time divided by the time from the beginning of training in the first world to the end
  of training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.chaos.inject.fault_outcomes import FaultOutcome, outcomes
from elastic.chaos.inject.plan import Injected
from elastic.driver import events
from elastic.driver.journal.entries import Entry
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker

EXAMPLES = 5  # maximum number of differing commits to list
LONG = 3.0  # a commit interval longer than the median by this factor may be a stall
STALL_S = 0.25


@dataclass
class Recovery:
    """Change from one training world of elastic.run to the next.

    Args:
        at_s: seconds since training began.
    """

    at_s: float
    generation: int
    kind: str  # "recovery" or "change"
    reason: str
    size: int
    total_ms: float
    phases_ms: dict[str, float]


@dataclass
class Steps:
    """Numbers of commits that were kept, lost, or gone with their holders.

    Args:
        again_s: seconds of uncommitted work that was repeated.
    """

    kept: int = 0
    lost: int = 0
    gone: int = 0
    again_s: float = 0.0
    lost_at: list[str] = field(default_factory=list)


@dataclass
class Goodput:
    """Training time of a job, as defined in the module, in seconds.

    Args:
        full_s: training time with at least the initial number of workers.
    """

    total_s: float = 0.0
    training_s: float = 0.0
    full_s: float = 0.0
    worker_s: float = 0.0  # training time multiplied by the number of workers, in worker-seconds
    stalled_s: float = 0.0
    workers: int = 0

    @property
    def share(self) -> float:
        return self.training_s / self.total_s if self.total_s else 0.0

    @property
    def full_share(self) -> float:
        return self.full_s / self.total_s if self.total_s else 0.0

    @property
    def worker_share(self) -> float:
        """Return the workers' total training time as a fraction of the time available to all initial workers."""
        whole = self.total_s * self.workers
        return self.worker_s / whole if whole else 0.0


@dataclass
class Digests:
    """Results of comparing the workers' digests of commits and of state copies.

    Args:
        compared: number of commits and copies reported by several workers.
        single: number of commits and copies reported by one worker.
    """

    compared: int = 0
    differing: int = 0
    single: int = 0
    examples: list[str] = field(default_factory=list)
    # whether the comparison included digests of commits, not only those of state copies
    of_commits: bool = False


@dataclass
class Report:
    """Evaluation of a job under faults.

    Args:
        code: the job's exit code.
        broken: violated invariants, one sentence each.
        trained: whether a worker of elastic.run completed a collective. If not, nothing was tested.
        planned: number of faults in the plan.
        missed: planned faults that were not injected, one sentence each.
    """

    code: int
    ended: str
    faults: list[FaultOutcome]
    spared: int
    recoveries: list[Recovery]
    steps: Steps
    goodput: Goodput
    digests: Digests
    broken: list[str] = field(default_factory=list)
    trained: bool = True
    planned: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Return the job's exit code, or 1 if the job exited with 0 but violated an invariant or tested nothing."""
        promises = self.broken or self.steps.lost or self.digests.differing
        return self.code or (1 if promises or not self.trained else 0)


def report(
    settings: Settings,
    entries: Sequence[Entry],
    injected: Sequence[Injected],
    *,
    code: int,
    spared: int = 0,
    broken: Iterable[str] = (),
    planned: int = 0,
    missed: Iterable[str] = (),
) -> Report:
    """Evaluate the journal of a job under faults.

    Args:
        settings: settings of the job.
        entries: entries of the journal.
        injected: the injected faults.
        code: the job's exit code.
        spared: number of random faults for which no victim was allowed.
    """
    reading = _Reading(settings)
    for entry in entries:
        reading.read(entry)
    reading.finish()
    reading.leave_out_stalls([(each.at, each.until or each.at) for each in injected])
    return Report(
        code,
        # The exit code of the process; after a stop request, it is that of the signal.
        f"exit code {code}: {reading.ended}" if reading.ended else "",
        outcomes(entries, injected, began_at=reading.began_at or 0.0),
        spared,
        reading.recoveries,
        reading.steps,
        reading.goodput,
        reading.digests(),
        list(broken),
        reading.trained,
        planned,
        list(missed),
    )


def percentiles(values: Iterable[float], shares: Sequence[float] = (50, 90, 100)) -> list[float]:
    """Return percentiles by the nearest-rank method, so that each is a measured value.

    Return an empty list if ``values`` is empty.
    """
    ordered = sorted(values)
    return [ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in shares if ordered]


class _Reading:
    def __init__(self, settings: Settings) -> None:
        self.began_at: float | None = None
        self.ended = ""  # reason for the end of the job
        self.trained = False
        self.recoveries: list[Recovery] = []
        self.steps = Steps()
        self.goodput = Goodput(workers=settings.np)
        self._digests: dict[Commit, dict[Worker, int]] = {}
        self._sees_commits = False  # unlike commits, state copies (commit 0) are always compared
        self._history: list[Commit] = []  # current committed history
        self._held: dict[Worker, Commit] = {}  # newest commit that each worker is known to hold
        self._generation = 0
        self._size = 0
        self._training_since: float | None = None
        self._committed_at: float | None = None  # time of this generation's newest commit
        # (time of a commit, time of the next commit in the same world, size of the world)
        self._gaps: list[tuple[float, float, int]] = []
        self._over_at: float | None = None
        self._at = 0.0

    def read(self, entry: Entry) -> None:
        self._at = entry.at
        match entry.event:
            case events.WorkerDigested() as digested:
                self._digested(digested)
            case events.WorkerReady(worker=worker, commit=commit) if commit is not None:
                self._held[worker] = max(commit, self._held.get(worker, commit))
            case events.WorkersReady(workers, commit=commit) if commit is not None:
                for worker in workers:
                    self._held[worker] = max(commit, self._held.get(worker, commit))
            case events.WorkerResumed() | events.WorkersResumed():
                self.trained = True
            case events.WorkerReturned():
                self._training_ends(entry.at)
                self._over(entry.at)
        for action in entry.actions:
            match action:
                case events.PublishWorld():
                    self._published(action)
                case events.BreakWorld(generation=generation) if generation == self._generation:
                    self._world_breaks(entry.at)
                case events.StopMembersAt():
                    self._training_ends(entry.at)
                case events.ReportRecovery():
                    self._trains(action, entry.at)
                case events.EndJob(code, reason):
                    self.ended = str(reason)
                    if code:
                        self._world_breaks(entry.at)
                    self._training_ends(entry.at)
                    self._over(entry.at)

    def finish(self) -> None:
        """Complete the evaluation at the end of the journal, even if the journal contains no end of the job."""
        self._training_ends(self._at)
        self._over(self._at)
        self.steps.kept = len(self._history)

    def leave_out_stalls(self, faults: Sequence[tuple[float, float]]) -> None:
        """Subtract stalls caused by faults, given as time ranges, from the training time."""
        usual = statistics.median(after - before for before, after, _ in self._gaps or [(0, 0, 0)])
        for before, after, size in self._gaps:
            longer = after - before > max(LONG * usual, STALL_S)
            if not longer or not any(at < after and until > before for at, until in faults):
                continue
            stalled = after - before - usual
            self.goodput.stalled_s += stalled
            self._train(-stalled, size)

    def digests(self) -> Digests:
        several = {c: found for c, found in self._digests.items() if len(found) > 1}
        differing = {c: f for c, f in several.items() if len(set(f.values())) > 1}
        examples = [
            f"commit {commit}: {', '.join(f'{w} {d:016x}' for w, d in sorted(found.items()))}"
            for commit, found in list(differing.items())[:EXAMPLES]
        ]
        single = len(self._digests) - len(several)
        return Digests(len(several), len(differing), single, examples, self._sees_commits)

    # ---- commits ---------------------------------------------------------------------------------

    def _digested(self, event: events.WorkerDigested) -> None:
        found = self._digests.setdefault(event.commit, {})
        if not found and event.commit.number:
            self._history.append(event.commit)
            self._sees_commits = True
        found[event.worker] = event.digest
        held = self._held.get(event.worker, event.commit)
        self._held[event.worker] = max(held, event.commit)
        if event.commit.generation != self._generation:
            return
        if len(found) == 1 and self._committed_at is not None:
            self._gaps.append((self._committed_at, self._at, self._size))
        self._committed_at = self._at

    def _published(self, world: events.PublishWorld) -> None:
        self._training_ends(self._at)
        members = [member.worker for member in world.members]
        held = max((self._held[w] for w in members if w in self._held), default=None)
        start = world.commit
        undone = [c for c in self._history if start is None or c > start]
        lost = [c for c in undone if held is not None and c <= held]
        if lost:
            self.steps.lost += len(lost)
            self.steps.lost_at.append(
                f"generation {world.generation} began at {start or 'nothing'}, but a member held {held}"
            )
        self.steps.gone += len(undone) - len(lost)
        self._history = [c for c in self._history if c not in set(undone)]
        self._held = {worker: commit for worker, commit in self._held.items() if worker in members}
        self._generation, self._size = world.generation, len(members)
        self._committed_at = None

    # ---- time ------------------------------------------------------------------------------------

    def _trains(self, done: events.ReportRecovery, at: float) -> None:
        if self.began_at is None:
            self.began_at = at
        if done.generation == self._generation and self._over_at is None:
            self._training_since = at
        if done.kind != "start":
            self.recoveries.append(
                Recovery(
                    at - self.began_at,
                    done.generation,
                    done.kind,
                    str(done.reason),
                    done.size,
                    done.total_ms,
                    done.phases_ms,
                )
            )

    def _world_breaks(self, at: float) -> None:
        since = self._training_since
        if since is None:
            return
        # Without digests, commits are unknown, so all work so far counts as kept.
        kept_until = max(since, self._committed_at or since) if self._sees_commits else at
        self._training_ends(kept_until)
        self.steps.again_s += at - kept_until

    def _training_ends(self, at: float) -> None:
        if self._training_since is None:
            return
        spent = max(0.0, at - self._training_since)
        self._training_since = None
        self._train(spent, self._size)

    def _train(self, seconds: float, size: int) -> None:
        self.goodput.training_s += seconds
        self.goodput.worker_s += seconds * size
        if size >= self.goodput.workers:
            self.goodput.full_s += seconds

    def _over(self, at: float) -> None:
        if self._over_at is None:
            self._over_at = at
            self.goodput.total_s = at - self.began_at if self.began_at is not None else 0.0
