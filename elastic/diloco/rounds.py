"""Rounds of one DiLoCo worker: its collectives after each inner step, and its agreement with others after a change.

Leaders exchange the changes of their islands. A worker without islands is the leader of its own island.

Pure: no I/O, no clock.

`Rounds.step` yields actions, which the caller performs in this order and answers. If a collective fails because a peer
was lost, the caller abandons the generator and calls `Rounds.interrupted`: the merge stays pending, and is repeated in
the next world. A collective may complete on some ranks and fail on others. The other ranks then take the merge from a
rank on which it has completed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.diloco.islands import Islands
from elastic.diloco.schedule import RoundSchedule, Sent
from elastic.errors import Invalid


@dataclass(frozen=True)
class CompareReports:
    """Action: exchange ``report`` with all ranks. The answer is the list of all reports, by rank."""

    report: str


@dataclass(frozen=True)
class TakeMerges:
    """Action: receive outer parameters and optimizer from rank ``root``.

    ``fragments`` are the fragments that the root has merged and this rank has not. Collective: ranks without such
    fragments take part as well.
    """

    root: int
    fragments: tuple[int, ...]


@dataclass(frozen=True)
class TakeInner:
    """Action: receive the inner parameters and the inner optimizer from rank ``root`` of this island, unless ``kept``.

    Collective in the island.
    """

    root: int
    kept: bool  # this rank has the same ones already


@dataclass(frozen=True)
class CompareIsland:
    """Action: check that the members' changes of a fragment are equal, and exchange ``tokens``.

    Collective in the island. The answer is the list of all members' tokens, by rank.
    """

    sent: Sent
    tokens: float


@dataclass(frozen=True)
class StartMean:
    """Action: start the mean of a fragment's pseudo-gradients. Collective among ``leaders``.

    ``weight`` is the share of this island, in tokens, or None if islands have equal weights.
    """

    sent: Sent
    leaders: tuple[int, ...]
    weight: float | None


@dataclass(frozen=True)
class AwaitMean:
    """Action: wait for the mean that this rank started last."""

    fragment: int


@dataclass(frozen=True)
class ShareMean:
    """Action: broadcast the mean from rank ``root``, the leader. Collective in the island."""

    fragment: int
    root: int


@dataclass(frozen=True)
class ApplyMean:
    """Action: apply the mean to its fragment."""

    fragment: int


Action = (
    CompareReports
    | TakeMerges
    | TakeInner
    | CompareIsland
    | StartMean
    | AwaitMean
    | ShareMean
    | ApplyMean
)


class Rounds:
    """Position, merges and pending fragment of one worker.

    Attributes:
        position: number of inner steps of the job.
        own_steps: number of inner steps that this worker's inner parameters contain.
        merges_before: number of merges before the inner parameters became a copy of the outer ones.
        merged: number of merges, by fragment.
        pending: fragment that is to be merged, or None.
        tokens: tokens of this worker since the last merge of each fragment.
        weighted: whether the script reports tokens, or None before its first step.
    """

    def __init__(self, schedule: RoundSchedule) -> None:
        self.schedule = schedule
        self.position = self.own_steps = self.merges_before = 0
        self.merged = [0] * schedule.fragments
        self.pending: Sent | None = None
        self.tokens = [0.0] * schedule.fragments
        self.weighted: bool | None = None
        self.islands = Islands.apart(1, 0)
        self._sent_tokens = 0.0  # of the last sent fragment
        self._started = False  # the collective of the pending fragment, in this world
        self._world: Hashable = None  # the world in which reports were compared

    def step(
        self, world: Hashable, islands: Islands, tokens: float | None = None
    ) -> Generator[Action, Any, None]:
        """Count an inner step, and yield the actions that are due.

        Args:
            world: identity of the current world.
            islands: islands of that world.
            tokens: tokens of this worker's batch, or None if the script does not report them.

        Raises:
            Invalid: the tokens are not a number of at least 0, or are reported in some steps only.
        """
        self._count(tokens)
        self.own_steps += 1
        self.position += 1
        yield from self.enter(world, islands)
        sent = self._scheduled()
        if sent is not None:
            self.pending = sent
            yield from self._send()
            yield from self._merge_due()

    def enter(self, world: Hashable, islands: Islands) -> Generator[Action, Any, None]:
        """Yield the actions that synchronize with the ranks of a new world and complete a merge left pending."""
        if world != self._world:
            self.islands = islands
            yield from self._meet()
            self._world = world
        yield from self._merge_due()

    def interrupted(self) -> None:
        """Record that a collective of this step, or of `enter`, failed."""
        self._started = False

    def shared(self) -> dict[str, Any]:
        """Return the values that are equal on all ranks after a change of the world."""
        pending = None if self.pending is None else tuple(self.pending)
        return {
            "position": self.position,
            "merged": list(self.merged),
            "pending": pending,
            "weighted": self.weighted,
        }

    def take_shared(self, values: dict[str, Any]) -> None:
        """Set the values from `shared`; the next step compares them with the other ranks."""
        for fragment, merges in enumerate(values["merged"]):
            if merges > self.merged[fragment]:
                self._merged_tokens(fragment)
        self.position, self.merged = values["position"], list(values["merged"])
        self.pending = None if values["pending"] is None else Sent(*values["pending"])
        self.weighted = values.get("weighted")  # missing in older checkpoints
        if not self.own_steps:
            self.merges_before = sum(self.merged)
        self._started = False
        self._world = None

    def own(self) -> dict[str, Any]:
        """Return the values of this worker."""
        return {"origin": self._origin(), "tokens": list(self.tokens)}

    def take_own(self, values: dict[str, Any]) -> None:
        """Set the values from `own`."""
        (self.own_steps, self.merges_before), self.tokens = values["origin"], list(values["tokens"])

    def _origin(self) -> tuple[int, int]:
        return self.own_steps, self.merges_before

    def _count(self, tokens: float | None) -> None:
        if tokens is not None and not 0 <= tokens < math.inf:
            raise Invalid(
                f"tokens is {tokens!r}: pass the number of tokens of this worker's batch, 0 or more"
            )
        if self.weighted is None or not self.own_steps:
            # A script that resumes from a checkpoint may differ from the one that wrote it.
            self.weighted = tokens is not None
        if self.weighted is not (tokens is not None):
            raise Invalid(
                "tokens= was passed in some inner steps only, so islands cannot be weighted: pass tokens= in every"
                " step() call of every worker, or omit it everywhere"
            )
        for fragment in range(self.schedule.fragments):
            self.tokens[fragment] += tokens or 0.0

    def _scheduled(self) -> Sent | None:
        """Return the fragment that is sent after this step, or None if no fragment is, or it was already merged."""
        sent = self.schedule.sent_at(self.position)
        return sent if sent is not None and self._is_owed(sent) else None

    def _is_owed(self, sent: Sent) -> bool:
        scheduled = (sent.step - 1) // self.schedule.every + 1
        return self.merged[sent.fragment] < scheduled

    def _meet(self) -> Generator[Action, Any, None]:
        """Yield the actions that synchronize position, merges and pending fragment with all ranks of a new world.

        The inner parameters are synchronized with the ranks of the island.
        """
        self._started = False
        reports: Sequence[str] = yield CompareReports(
            json.dumps([self.position, self.merged, self.pending, self._origin()])
        )
        told = [json.loads(report) for report in reports]
        merges = [sum(merged) for _, merged, _, _ in told]
        if min(merges) != max(merges):
            root = merges.index(max(merges))
            theirs = list(told[root][1])
            missing = [f for f, count in enumerate(theirs) if count != self.merged[f]]
            yield TakeMerges(root, tuple(missing))
            for fragment in missing:
                self._merged_tokens(fragment)
            self.merged = theirs
        # After the merges, which would otherwise be mixed twice into the inner parameters that this rank receives.
        origins = [tuple(origin) for _, _, _, origin in told]
        # Now that all have the same merges, this is the number of changes of the inner parameters, plus a constant.
        source = self.islands.source([own_steps - before for own_steps, before in origins])
        if source is not None:
            yield TakeInner(source, kept=origins[self.islands.rank] == origins[source])
            self.own_steps, self.merges_before = origins[source]
        self.position = max(position for position, _, _, _ in told)
        owed = [Sent(*each) for _, _, each, _ in told if each is not None]
        owed = [each for each in owed if self._is_owed(each)]
        self.pending = min(owed, key=lambda each: each.step, default=None)
        if self.pending is not None:
            yield from self._send()

    def _send(self) -> Generator[Action, Any, None]:
        assert self.pending is not None
        self._sent_tokens = self.tokens[self.pending.fragment]
        tokens: Sequence[float] = [self._sent_tokens]
        if len(self.islands.members) > 1:
            tokens = yield CompareIsland(self.pending, self._sent_tokens)
        if self.islands.leads:
            weight = sum(tokens) if self.weighted else None
            yield StartMean(self.pending, self.islands.leaders, weight)
        self._started = True

    def _merge_due(self) -> Generator[Action, Any, None]:
        while self.pending is not None and self.pending.due <= self.position:
            if not self._started:
                # The collective failed in this world, and the next commit() raises.
                yield from self._send()
            fragment = self.pending.fragment
            self._started = False
            if self.islands.leads:
                yield AwaitMean(fragment)
            if len(self.islands.members) > 1:
                yield ShareMean(fragment, self.islands.leader)
            yield ApplyMean(fragment)
            self._merged_tokens(fragment)
            self.merged[fragment] += 1
            self.pending = None

    def _merged_tokens(self, fragment: int) -> None:
        """Remove the tokens of a merge, which this rank may have sent in a step that was restored since."""
        self.tokens[fragment] = max(0.0, self.tokens[fragment] - self._sent_tokens)
