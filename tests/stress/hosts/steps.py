"""Evaluation of the workers' notes of their steps: survivors, recovery times and repeated steps. Pure.

Terms, all based on the workers' own notes (see `training`):

- a *survivor* of a fault has committed steps before and after it, in one process; if training was interrupted, after it
    has entered training again, since a step that was nearly done shows nothing.
- a step has *failed* if a survivor began it, did not commit it, and had to enter training again before it.
- a committed step is *lost* if a worker had committed it, and entered training again before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.errors import Invalid

ENTERED, BEGAN, COMMITTED = KINDS = ("entered", "began", "committed")


@dataclass(frozen=True)
class Note:
    """``at``: seconds on the machine's monotonic clock. ``size``: of the worker's world."""

    at: float
    kind: str
    step: int
    size: int


@dataclass(frozen=True)
class WorkerNotes:
    """One process and its notes, oldest first."""

    host: str
    notes: Sequence[Note]

    def commits(self) -> list[Note]:
        return [note for note in self.notes if note.kind == COMMITTED]


@dataclass(frozen=True)
class SurvivorSteps:
    """Consequences for the survivors, in milliseconds since ``at`` for the slowest one."""

    survivors: int
    interrupted: bool  # they had to enter training again
    next_step_ms: float | None  # first commit, if interrupted after entering training again
    pause_ms: float  # longest time between two commits of one survivor
    failed: int  # number of distinct steps
    lost: int  # number of distinct committed steps, of all workers


def notes_of(text: str) -> list[Note]:
    """Parse the complete lines of a file. Raises Invalid if one is not a note."""
    notes = []
    for line in text.split("\n")[:-1]:  # the last line may be incomplete
        try:
            at, kind, step, size = line.split(" ")
            notes.append(Note(float(at), kind, int(step), int(size)))
        except ValueError:
            raise Invalid(f"{line!r} is not a note of a step") from None
        if kind not in KINDS:
            raise Invalid(f"{line!r} is not a note of a step: unknown kind {kind!r}")
    return notes


def aftermath(workers: Iterable[WorkerNotes], at: float, until: float) -> SurvivorSteps:
    """Evaluate the consequences of the fault at ``at`` up to ``until``."""
    known = list(workers)
    old = [worker for worker in known if any(note.at < at for note in worker.commits())]
    entered = [_first(worker, ENTERED, at, until) for worker in old]
    interrupted = any(when is not None for when in entered)
    next_steps: list[float] = []
    pauses: list[float] = []
    failed: set[int] = set()
    for worker, anew in zip(old, entered, strict=True):
        failed |= _failed(worker, at, until)
        since = anew if interrupted else at
        again = None if since is None else _first(worker, COMMITTED, since, until)
        if again is None:
            continue
        next_steps.append(1e3 * (again - at))
        times = [note.at for note in worker.commits() if note.at <= until]
        pauses += [1e3 * (b - a) for a, b in pairwise(times) if b >= at]
    return SurvivorSteps(
        len(next_steps),
        interrupted,
        max(next_steps, default=None),
        max(pauses, default=0.0),
        len(failed),
        len({step for worker in known for step in _lost(worker)}),
    )


def _first(worker: WorkerNotes, kind: str, since: float, until: float) -> float | None:
    """Return the time of its first such note in that range."""
    times = (note.at for note in worker.notes if note.kind == kind and since <= note.at <= until)
    return next(times, None)


def _failed(worker: WorkerNotes, at: float, until: float) -> set[int]:
    """Return the steps in progress when training was entered again before them, between ``at`` and ``until``."""
    found = set()
    begun: int | None = None
    for note in worker.notes:
        match note.kind:
            case "began":
                begun = note.step
            case "committed":
                begun = None
            case "entered":
                # A commit that is interrupted by a planned change has already saved its step.
                if begun is not None and note.step < begun and at <= note.at <= until:
                    found.add(begun)
                begun = None
    return found


def _lost(worker: WorkerNotes) -> set[int]:
    found: set[int] = set()
    newest = 0
    for note in worker.notes:
        if note.kind == ENTERED:
            found |= set(range(note.step + 1, newest + 1))
            newest = note.step
        elif note.kind == COMMITTED:
            newest = max(newest, note.step)
    return found
