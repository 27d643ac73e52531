"""Rounds of one DiLoCo worker: which collective it takes part in after each inner step, and how workers agree again
after a change of the world.

Pure: no I/O, no clock.

`Rounds.step` yields actions, which the caller performs in this order and answers. If a collective fails because a peer
was lost, the caller abandons the generator and calls `Rounds.interrupted`: the merge stays pending, and is repeated
in the next world. A collective may complete on some ranks and fail on others; the others then take the
merge from a rank on which it has completed.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.diloco.schedule import RoundSchedule, Sent


@dataclass(frozen=True)
class CompareReports:
    """Exchange ``report`` with all ranks. The answer is the list of all reports, by rank."""

    report: str


@dataclass(frozen=True)
class TakeMerges:
    """Receive outer parameters and optimizer from rank ``root``; ``fragments`` are those that it has merged and this
    rank has not. Collective: ranks without such fragments take part as well."""

    root: int
    fragments: tuple[int, ...]


@dataclass(frozen=True)
class StartMean:
    """Start the mean of a fragment's pseudo-gradients."""

    sent: Sent


@dataclass(frozen=True)
class ApplyMean:
    """Wait for the mean that was started last, and apply it to its fragment."""

    fragment: int


Action = CompareReports | TakeMerges | StartMean | ApplyMean


class Rounds:
    """Position, merges and pending fragment of one worker.

    Attributes:
        position: number of inner steps of the job.
        merged: number of merges, by fragment.
        pending: fragment that is to be merged, or None.
    """

    def __init__(self, schedule: RoundSchedule) -> None:
        self.schedule = schedule
        self.position = 0
        self.merged = [0] * schedule.fragments
        self.pending: Sent | None = None
        self._started = False  # the collective of the pending fragment, in this world
        self._world: Hashable = None  # the world in which reports were compared

    def step(self, world: Hashable) -> Generator[Action, Any, None]:
        """Count an inner step, and yield the actions that are due.

        Args:
            world: identity of the current world.
        """
        self.position += 1
        yield from self.enter(world)
        sent = self._scheduled()
        if sent is not None:
            self.pending = sent
            yield from self._send()
            yield from self._merge_due()

    def enter(self, world: Hashable) -> Generator[Action, Any, None]:
        """Agree with the ranks of a new world, and complete a merge that the previous world has left pending."""
        if world != self._world:
            yield from self._meet()
            self._world = world
        yield from self._merge_due()

    def interrupted(self) -> None:
        """Record that a collective of this step, or of `enter`, failed."""
        self._started = False

    def shared(self) -> dict[str, Any]:
        """Return the numbers that are equal on all ranks after a change of the world."""
        pending = None if self.pending is None else tuple(self.pending)
        return {"position": self.position, "merged": list(self.merged), "pending": pending}

    def take_shared(self, values: dict[str, Any]) -> None:
        """Set the numbers from `shared`; the next step compares them with the other ranks."""
        self.position, self.merged = values["position"], list(values["merged"])
        self.pending = None if values["pending"] is None else Sent(*values["pending"])
        self._started = False
        self._world = None

    def _scheduled(self) -> Sent | None:
        """Return the fragment that is sent after this step, unless it was merged."""
        sent = self.schedule.sent_at(self.position)
        return sent if sent is not None and self._is_owed(sent) else None

    def _is_owed(self, sent: Sent) -> bool:
        scheduled = (sent.step - 1) // self.schedule.every + 1
        return self.merged[sent.fragment] < scheduled

    def _meet(self) -> Generator[Action, Any, None]:
        """Agree on position, merges and pending fragment with all ranks of a new world."""
        self._started = False
        reports: Sequence[str] = yield CompareReports(
            json.dumps([self.position, self.merged, self.pending])
        )
        told = [json.loads(report) for report in reports]
        merges = [sum(merged) for _, merged, _ in told]
        if min(merges) != max(merges):
            root = merges.index(max(merges))
            theirs = list(told[root][1])
            missing = [f for f, count in enumerate(theirs) if count != self.merged[f]]
            yield TakeMerges(root, tuple(missing))
            self.merged = theirs
        self.position = max(position for position, _, _ in told)
        owed = [Sent(*each) for _, _, each in told if each is not None]
        owed = [each for each in owed if self._is_owed(each)]
        self.pending = min(owed, key=lambda each: each.step, default=None)
        if self.pending is not None:
            yield from self._send()

    def _send(self) -> Generator[Action, Any, None]:
        assert self.pending is not None
        yield StartMean(self.pending)
        self._started = True

    def _merge_due(self) -> Generator[Action, Any, None]:
        while self.pending is not None and self.pending.due <= self.position:
            if not self._started:
                # The collective failed in this world; the next commit() raises.
                yield from self._send()
            fragment = self.pending.fragment
            self._started = False
            yield ApplyMean(fragment)
            self.merged[fragment] += 1
            self.pending = None
