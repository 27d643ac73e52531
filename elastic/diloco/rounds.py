"""Rounds of one DiLoCo worker: collectives after each inner step, and synchronization with a new world.

Leaders exchange the changes of their islands. A worker without islands is the leader of its own island.

Pure: no I/O, no clock.

`Rounds.step` yields actions. The caller performs each action and sends its answer to the generator. If a collective
fails because a peer was lost, the caller abandons the generator and calls `Rounds.interrupted`: the merge stays
pending, and is repeated in the next world. A collective may complete on some ranks and fail on others. The ranks on
which it has failed then catch up with a rank that has applied its mean. If they, or another rank of their island, have
received the mean but not applied it, they apply it now. Otherwise they receive the merged outer parameters, if possible
from a rank of their island.

With a quorum, merges have one order, and are counted from the start of the job. A round ends once the fastest island
has taken ``every`` inner steps: the other islands then send their changes after their next inner step. A merge does not
wait for an island that is late (see `attendance`). The late island receives the mean in the background and adds the
change of the outer parameters to its inner parameters. Its own change therefore stays the same and takes part in the
next merge.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic.diloco.islands import Islands
from elastic.diloco.schedule import RoundSchedule, Sent
from elastic.errors import Invalid, StateMismatch


@dataclass(frozen=True)
class CompareReports:
    """Action: exchange ``report`` with all ranks. The answer is the list of all ranks' reports."""

    report: str


@dataclass(frozen=True)
class TakeMerges:
    """Action: receive outer parameters and entries of the outer optimizer from rank ``root``.

    ``fragments`` are the fragments that the root has merged and this rank has not, and ``missed`` those of them whose
    merge does not contain the change of this rank's island. ``sent`` are the fragments that any receiver lacks.
    Collective in the island if ``in_island`` is true, otherwise among all ranks: ranks without such fragments take part
    as well.
    """

    root: int
    fragments: tuple[int, ...]
    missed: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    in_island: bool = False


@dataclass(frozen=True)
class TakeInner:
    """Action: receive the inner parameters and the inner optimizer from rank ``root`` of this island.

    Collective in the island.
    """

    root: int
    kept: bool  # whether this rank already has these values and takes part without changing them


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

    ``weight`` is the weight of this island in the mean, in tokens, or None if islands have equal weights.
    """

    sent: Sent
    leaders: tuple[int, ...]
    weight: float | None


@dataclass(frozen=True)
class AwaitMean:
    """Action: wait for the mean of the current merge.

    With a quorum, the answer is the list of names of the islands that are absent from the mean.
    """

    fragment: int


@dataclass(frozen=True)
class ShareMean:
    """Action: broadcast the mean from rank ``root``, the leader. Collective in the island.

    The answer is that of `AwaitMean`.
    """

    fragment: int
    root: int


@dataclass(frozen=True)
class ApplyMean:
    """Action: apply the mean to its fragment.

    If ``missed`` is true, the mean does not contain the change of this island. ``repeated`` is true if another rank
    applied the mean in the previous world.
    """

    fragment: int
    missed: bool = False
    repeated: bool = False


@dataclass(frozen=True)
class Follow:
    """Action: receive from rank ``root`` the leaders' decisions, beginning with merge number ``merge``.

    Collective in the island, and only with a quorum. The answer is a `Decisions`.
    """

    merge: int
    root: int


class Decisions(NamedTuple):
    """Decisions of the leaders, beginning with the requested merge."""

    decided: int  # number of consecutive decided merges
    wanted: bool  # whether another island has sent its change for the first undecided merge


@dataclass(frozen=True)
class TakePart:
    """Action: take part in merges in the background, beginning with merge number ``merge``. Called on a leader."""

    merge: int
    leaders: tuple[int, ...]


Action = (
    CompareReports
    | TakeMerges
    | TakeInner
    | CompareIsland
    | StartMean
    | AwaitMean
    | ShareMean
    | ApplyMean
    | Follow
    | TakePart
)
MOST_ABSENT = 16  # number of latest merges whose absent islands are recorded


class WorldId(NamedTuple):
    """Identity of a world. Worlds of a job differ in their generations."""

    generation: int
    runtime: int = 0  # identity of the runtime in this process


class MeanId(NamedTuple):
    """Identity of a mean. A merge that is repeated in another world has another mean."""

    merge: int  # number of the merge, counted from the start of the job
    generation: int  # generation of the world in which the mean was computed


class WorldReport(NamedTuple):
    """Report that each rank sends when it enters a world."""

    position: int
    merged: list[int]
    pending: Sent | None
    origin: tuple[int, int]  # values of `Rounds.own_steps` and `Rounds.merges_before`
    absent: list[
        tuple[int, tuple[str, ...]]
    ]  # names of the absent islands in the latest merges, by number of the merge
    took: bool  # whether the rank has received merges from another rank
    applied: MeanId | None = None  # mean of the last merge
    received: MeanId | None = None  # mean that the rank has received and not applied

    @staticmethod
    def decoded(report: str) -> WorldReport:
        """Return the report that `Rounds.report` has encoded."""
        found = WorldReport(*json.loads(report))
        return found._replace(applied=_mean_id(found.applied), received=_mean_id(found.received))


def _mean_id(values: Sequence[int] | None) -> MeanId | None:
    return None if values is None else MeanId(*values)


def adopted(reports: Sequence[str], senders: Mapping[int, int]) -> list[str]:
    """Return the reports of all ranks as they are after joining ranks have received the state of another rank.

    Ranks can therefore report before that, and need not wait for each other. A rank that has taken inner steps does not
    receive the values of `Rounds.shared`.

    Args:
        reports: the reports of all ranks, by rank, as of the time before.
        senders: ranks that receive the state, each with the rank that sends it.
    """
    world_reports = [*map(WorldReport.decoded, reports)]
    found = list(reports)
    for rank, sender in senders.items():
        mine, theirs = world_reports[rank], world_reports[sender]
        own_steps, _ = mine.origin
        if own_steps:
            continue
        gained = any(map(operator.gt, theirs.merged, mine.merged))
        absent = dict(mine.absent) | dict(theirs.absent)
        found[rank] = json.dumps(
            theirs._replace(
                origin=(0, sum(theirs.merged)),
                absent=sorted(absent.items())[-MOST_ABSENT:],
                took=mine.took or gained,
                received=mine.received,
            )
        )
    return found


def _source_in(island: Sequence[int], reports: Sequence[WorldReport], newest: int) -> int | None:
    """Return the rank of an island from which its other ranks can get the merges of rank ``newest``, or None.

    It has applied them, or has received the mean of the last one, the only one that the island lacks.
    """
    merges = [sum(each.merged) for each in reports]
    for rank in island:
        if merges[rank] == merges[newest]:
            return rank
    applied = reports[newest].applied
    if applied is not None and all(merges[rank] == merges[newest] - 1 for rank in island):
        for rank in island:
            if reports[rank].received == applied:
                return rank
    return None


def _taken_from(
    root: int,
    gained: Mapping[int, bool],
    receivers: Sequence[WorldReport],
    newest: WorldReport,
    *,
    in_island: bool,
) -> TakeMerges:
    sent = [f for f, n in enumerate(newest.merged) if any(each.merged[f] < n for each in receivers)]
    missed = tuple(fragment for fragment, misses in gained.items() if misses)
    return TakeMerges(root, tuple(gained), missed, tuple(sent), in_island)


class Rounds:
    """State machine of one worker's rounds: its position, merges and pending fragment.

    Attributes:
        position: number of inner steps of the job.
        own_steps: number of inner steps that this worker's inner parameters contain.
        merges_before: number of merges at the time when the inner parameters were last set to the outer ones.
        merged: number of merges, by fragment.
        pending: fragment that was sent and not merged yet, or None.
        tokens: number of tokens of this worker since the last merge, by fragment.
        weighted: whether the script reports tokens, or None before its first step.
        quorum: whether merges proceed without late islands.
        replicated: whether all ranks of an island hold the same values. If False, each rank holds a shard of them.
        absent: names of the islands that a merge did not wait for, by the number of the merge. Empty without a quorum.
        applied: mean of the last merge, or None if it is unknown.
    """

    def __init__(
        self, schedule: RoundSchedule, *, quorum: bool = False, replicated: bool = True
    ) -> None:
        self.schedule, self.quorum, self.replicated = schedule, quorum, replicated
        self.absent: dict[int, tuple[str, ...]] = {}
        self.position = self.own_steps = self.merges_before = 0
        self.merged = [0] * schedule.fragments
        self.pending: Sent | None = None
        self.tokens = [0.0] * schedule.fragments
        self.weighted: bool | None = None
        self.islands = Islands.apart(1, 0)
        self._sent_tokens = 0.0  # tokens of the last sent fragment
        # last merge for which this island has sent its change, and the name of the island at that time
        self._sent_for: tuple[int, str] | None = None
        # Whether this rank has received merges from another rank since it entered a world.
        self._took = False
        self._started = (
            False  # whether the collective of the pending fragment was started in this world
        )
        self.applied: MeanId | None = None
        self._sent: MeanId | None = None  # mean for which this leader has sent the island's change
        self._has_mean = (
            False  # whether this rank has received the mean `_sent`, and not applied it
        )
        self._generation = -1  # generation of the world that was entered last
        self._world: WorldId | None = None  # the world in which reports were compared
        # inner step up to which all fragments that were due have been sent
        self._sent_until = 0

    def step(
        self, world: WorldId | None, islands: Islands, tokens: float | None = None
    ) -> Generator[Action, Any, None]:
        """Count an inner step, and yield the actions that are due.

        Args:
            world: identity of the current world, or None before ``init()``.
            islands: islands of that world.
            tokens: number of tokens in this worker's batch, or None if the script does not report it.

        Raises:
            Invalid: the tokens are not a number of at least 0, or are reported in some steps only.
        """
        self._count(tokens)
        self.own_steps += 1
        self.position += 1
        yield from self.enter(world, islands)
        if self.quorum and len(self.islands.leaders) > 1:
            yield from self._follow()
        sent = self._scheduled()
        while sent is not None:
            self.pending, self._sent_until = sent, sent.step
            yield from self._send()
            yield from self._merge_due()
            sent = self._scheduled()
        if self.pending is None:
            self._sent_until = self.position

    def enter(self, world: WorldId | None, islands: Islands) -> Generator[Action, Any, None]:
        """Yield the actions that synchronize with the ranks of a new world and complete a pending merge.

        Raises:
            StateMismatch: ranks with equally many merges have made the last one in different worlds.
        """
        if self.is_new(world):
            assert world is not None
            self.islands = islands
            yield from self._meet(world)
            self._world = world
        yield from self._merge_due()

    @property
    def keeps_means(self) -> bool:
        """Whether a rank can apply a mean that it has received in the previous world."""
        return self.replicated and not self.quorum

    def is_new(self, world: WorldId | None) -> bool:
        """Return whether `enter` synchronizes with the ranks of this world."""
        return world != self._world

    def report(self) -> str:
        """Return the report with which `enter` synchronizes with the other ranks, as JSON."""
        return json.dumps(
            WorldReport(
                self.position,
                self.merged,
                self.pending,
                self._origin(),
                self._absent(),
                self._took,
                self.applied,
                self._sent if self._has_mean else None,
            )
        )

    def mean_received(self) -> None:
        """Record that this rank has received the mean of the fragment that it has sent. Called on a leader."""
        self._has_mean = True

    def interrupted(self) -> None:
        """Record that a collective of `step` or `enter` failed."""
        self._started = False

    def shared(self) -> dict[str, Any]:
        """Return the values that a state shares between all ranks. They become equal when the world changes."""
        pending = None if self.pending is None else tuple(self.pending)
        return {
            "position": self.position,
            "merged": list(self.merged),
            "pending": pending,
            "weighted": self.weighted,
            "absent": self._absent(),
            "applied": None if self.applied is None else tuple(self.applied),
        }

    def take_shared(self, values: dict[str, Any]) -> dict[int, bool]:
        """Set the values that `shared` returned on another rank. The next step compares them with the other ranks.

        Returns:
            The fragments that only the other rank had merged, and whether the merge lacks the change of this island.
        """
        gained = self._gained(values["merged"], values.get("absent", ()))
        self._take_out_tokens(gained)
        self._took |= bool(gained)
        self.position, self.merged = values["position"], list(values["merged"])
        self.pending = None if values["pending"] is None else Sent(*values["pending"])
        self._sent_until = self.position if self.pending is None else self.pending.step
        # missing in older checkpoints:
        self.weighted = values.get("weighted")
        self.applied = _mean_id(values.get("applied"))
        if not self.own_steps:
            self.merges_before = sum(self.merged)
        self._started = False
        self._world = None
        return gained

    def own(self) -> dict[str, Any]:
        """Return the values that may differ between workers."""
        return {"origin": self._origin(), "tokens": list(self.tokens)}

    def take_own(self, values: dict[str, Any]) -> None:
        """Set the values that `own` returned."""
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
        """Return the fragment to send after this step.

        Return None if no fragment is due, the due fragment was already merged, or another fragment is in flight.
        """
        if self.pending is not None:
            return None
        if self.quorum:
            following = self.schedule.merge(sum(self.merged))
            return following if self.position >= following.step else None
        for step in range(self._sent_until + 1, self.position + 1):
            sent = self.schedule.sent_at(step)
            if sent is not None and self._is_owed(sent):
                return self.schedule.sent_late(sent, self.position)
        return None

    def _is_owed(self, sent: Sent) -> bool:
        scheduled = (sent.step - 1) // self.schedule.every + 1
        return self.merged[sent.fragment] < scheduled

    def _meet(self, world: WorldId) -> Generator[Action, Any, None]:
        """Yield the actions that synchronize position, merges and pending fragment with all ranks of a new world.

        The inner parameters are synchronized with the ranks of the island.
        """
        self._started, self._generation = False, world.generation
        reports: Sequence[str] = yield CompareReports(self.report())
        world_reports = [*map(WorldReport.decoded, reports)]
        merges = [sum(each.merged) for each in world_reports]
        newest = [rank for rank, total in enumerate(merges) if total == max(merges)]
        if len({world_reports[rank].applied for rank in newest}) > 1:
            raise StateMismatch(
                f"the outer parameters of ranks {newest} differ, because their last merge was made in different worlds:"
                " restart the job, which then resumes from its newest checkpoint"
            )
        if min(merges) != max(merges):
            yield from self._catch_up(world_reports)
        self._has_mean = False  # This merge is repeated, so its mean will be another one.
        # Inner parameters are received last: if they were received first, this rank would mix the merges into them
        # twice.
        origins = [tuple(each.origin) for each in world_reports]
        # All ranks have the same merges now, so this equals the number of changes of the inner parameters plus a
        # constant.
        changes = [own_steps - before for own_steps, before in origins]
        took = [
            self.quorum and (each.took or total < max(merges))
            for each, total in zip(world_reports, merges, strict=True)
        ]
        source = self.islands.source(changes, took)
        if source is not None:
            rank = self.islands.rank
            kept = origins[rank] == origins[source] and (rank == source or not took[rank])
            yield TakeInner(source, kept)
            self.own_steps, self.merges_before = origins[source]
        self._took = False
        self.position = max(each.position for each in world_reports)
        owed = [Sent(*each.pending) for each in world_reports if each.pending is not None]
        owed = [each for each in owed if self._is_owed(each)]
        self.pending = min(owed, key=lambda each: each.step, default=None)
        if self.pending is not None:
            self.pending = self.schedule.sent_late(self.pending, self.position)
        # The next step has counted itself already if it enters the world.
        self._sent_until = self.position - 1 if self.pending is None else self.pending.step
        self._sent_for = None
        if self.quorum and self.islands.leads and len(self.islands.leaders) > 1:
            yield TakePart(sum(self.merged), self.islands.leaders)
        if self.pending is not None:
            yield from self._send()

    def _catch_up(self, reports: Sequence[WorldReport]) -> Generator[Action, Any, None]:
        """Yield the actions after which this rank has made as many merges as the rank with the most merges."""
        merges = [sum(each.merged) for each in reports]
        root = merges.index(max(merges))
        latest, group = reports[root], self.islands.members
        sources = {
            each: _source_in(each, reports, root) if self.replicated else None
            for each in self.islands.groups
            if any(merges[rank] < merges[root] for rank in each)
        }
        gained = self._gained(latest.merged, latest.absent)
        if None in sources.values():
            yield _taken_from(root, gained, reports, latest, in_island=False)
        elif group in sources:
            source = sources[group]
            assert source is not None
            if merges[source] == merges[root]:
                members = [reports[rank] for rank in group]
                yield _taken_from(source, gained, members, latest, in_island=True)
            else:
                [fragment] = gained
                if len(group) > 1:
                    yield ShareMean(fragment, source)
                yield ApplyMean(fragment, repeated=True)
        self._take_out_tokens(gained)
        self._took |= bool(gained)
        self.merged, self.applied = list(latest.merged), latest.applied

    def _send(self) -> Generator[Action, Any, None]:
        assert self.pending is not None
        self._sent_tokens = self.tokens[self.pending.fragment]
        tokens: Sequence[float] = [self._sent_tokens]
        if self.quorum:
            # Set before the comparison: it may fail here and complete on the leader, which then sends the change.
            self._sent_for = sum(self.merged), self.islands.name
        if len(self.islands.members) > 1:
            tokens = yield CompareIsland(self.pending, self._sent_tokens)
        self._has_mean = False
        self._sent = MeanId(sum(self.merged), self._generation) if self.keeps_means else None
        if self.islands.leads:
            equal = 1.0 if self.quorum else None
            weight = sum(tokens) if self.weighted else equal
            yield StartMean(self.pending, self.islands.leaders, weight)
        self._started = True

    def _merge_due(self) -> Generator[Action, Any, None]:
        while self.pending is not None and self.pending.due <= self.position:
            if not self._started:
                # The collective failed in this world, and the next commit() raises.
                yield from self._send()
            yield from self._merge(self.pending.fragment)

    def _merge(self, fragment: int) -> Generator[Action, Any, None]:
        self._started = False
        absent: Sequence[str] | None = None
        if self.islands.leads:
            absent = yield AwaitMean(fragment)
            self.mean_received()
        if len(self.islands.members) > 1:
            absent = yield ShareMean(fragment, self.islands.leader)
        missed = False
        if self.quorum:
            assert absent is not None
            missed = self.islands.name in absent
            self._remember({sum(self.merged): tuple(absent)})
        yield ApplyMean(fragment, missed)
        self._has_mean = False
        self.applied = MeanId(sum(self.merged), self._generation)
        if not missed:
            self._merged_tokens(fragment)
        self.merged[fragment] += 1
        self.pending = None

    # ---- with a quorum

    def _follow(self) -> Generator[Action, Any, None]:
        """Complete decided merges, and send this island's change for a merge for which other islands wait.

        A merge is completed ``delay`` steps after its send, or immediately if the next merge has begun.
        """
        while True:
            decisions: Decisions = yield Follow(sum(self.merged), self.islands.leader)
            decided, wanted = decisions
            if self.pending is None and (decided or wanted):
                sent = self.schedule.merge(sum(self.merged))
                self.position = max(self.position, sent.step)
                self.pending = sent
                if decided:
                    self._started = True  # The merge was decided without the change of this island.
                else:
                    yield from self._send()
                    yield from self._merge_due()
                    return
            if self.pending is None or not decided:
                return
            if decided == 1 and not wanted and self.position < self.pending.due:
                return
            yield from self._merge(self.pending.fragment)

    def _absent(self) -> list[tuple[int, tuple[str, ...]]]:
        return sorted(self.absent.items())

    def _remember(self, absent: dict[int, tuple[str, ...]]) -> None:
        self.absent |= absent
        for number in sorted(self.absent)[:-MOST_ABSENT]:
            del self.absent[number]

    def _gained(
        self, merged: Sequence[int], absent: Sequence[tuple[int, Sequence[str]]]
    ) -> dict[int, bool]:
        """Return the fragments with more merges on another rank, and whether these lack the change of this island.

        Args:
            merged: number of merges on the other rank, by fragment.
            absent: absent islands of the last merges of the other rank, by the number of the merge.
        """
        theirs = {number: tuple(names) for number, names in absent}
        self._remember(theirs)
        taken = None
        if self._sent_for is not None:
            number, name = self._sent_for
            if number >= sum(self.merged) and name not in theirs.get(number, (name,)):
                taken = self.schedule.merge(number).fragment
        return {
            fragment: self.quorum and fragment != taken
            for fragment, merges in enumerate(merged)
            if merges > self.merged[fragment]
        }

    def _take_out_tokens(self, gained: dict[int, bool]) -> None:
        for fragment, missed in gained.items():
            if not missed:
                self._merged_tokens(fragment)

    def _merged_tokens(self, fragment: int) -> None:
        """Subtract the tokens that were sent for a merge, even if the step that sent them was rolled back."""
        self.tokens[fragment] = max(0.0, self.tokens[fragment] - self._sent_tokens)
