"""Steps that jobs under test write to files, and statistics of them. Pure but for `read` and `StepFiles`.

Each worker appends ``time generation size rank step`` to ``FOLDER/PID.steps`` for each step before it commits it. The
time is CLOCK_MONOTONIC in seconds, which is the same clock for all processes of a machine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One step of one worker."""

    pid: int
    at: float
    generation: int
    size: int
    rank: int
    step: int


def read(file: Path, begin: int = 0) -> tuple[list[Step], int]:
    """Read the steps from this byte on, and return them and the begin of the next line. Other lines are ignored."""
    with open(file, "rb") as stream:
        stream.seek(begin)
        whole, end, _ = stream.read().rpartition(b"\n")
    lines = (line.split() for line in whole.decode().splitlines())
    found = [
        Step(int(file.stem), float(parts[0]), *map(int, parts[1:]))
        for parts in lines
        if len(parts) == 5
    ]
    return found, begin + len(whole) + len(end)


class StepFiles:
    """All step files of a folder, while a job writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._steps: list[Step] = []
        self._read: dict[Path, int] = {}  # bytes of each file

    def steps(self) -> list[Step]:
        """Return all steps so far, by time; only new lines are read."""
        for path in self.folder.glob("*.steps"):
            found, self._read[path] = read(path, self._read.get(path, 0))
            self._steps += found
        self._steps.sort(key=lambda step: step.at)
        return list(self._steps)

    def newest_world(self) -> list[Step]:
        """Return the last step of each member of the newest world, by rank; empty until all have made a step in it."""
        steps = self.steps()
        newest = max((step.generation for step in steps), default=0)
        last = {step.pid: step for step in steps if step.generation == newest}
        complete = last and len(last) == max(step.size for step in last.values())
        return sorted(last.values(), key=lambda step: step.rank) if complete else []


def repeated(steps: Iterable[Step]) -> int:
    """Count steps that a worker made twice, because they were not committed when its world broke."""
    made = [(step.pid, step.step) for step in steps]
    return len(made) - len(set(made))


def committed_lost(steps: Iterable[Step]) -> int:
    """Count the commits that a following world did not resume from.

    A world must begin at the newest commit of the workers that stayed. A worker's last line of a world does not count
    as a commit, because that step may not be committed yet.
    """
    by_world: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        by_world[step.generation][step.pid].append(step.step)
    worlds = [by_world[generation] for generation in sorted(by_world)]
    lost = 0
    for before, after in itertools.pairwise(worlds):
        stayed = before.keys() & after.keys()
        committed = max((before[pid][-1] - 1 for pid in stayed), default=0)
        lost += max(0, committed + 1 - min(numbers[0] for numbers in after.values()))
    return lost
