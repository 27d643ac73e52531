"""One step of a fixed number of shards, and who is told of it. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from elastic.exact import tree


class ShardStep(NamedTuple):
    """One step as this rank takes it."""

    number: int
    held: tuple[tuple[int, ...], ...]  # the shards of each rank
    rank: int
    merges: list[tree.Merge]  # what becomes of each of this rank's shards
    partials: list[list[tree.Node]]  # that each rank is left with


class StepListener(Protocol):
    """Who is told of a step, in the order in which they began to listen."""

    def step_begins(self, step: ShardStep) -> None: ...

    def shard_begins(self, merge: tree.Merge, last: bool) -> None:
        """``last``: of this rank's shards."""

    def shard_ends(self, shard: int) -> None: ...

    def step_ends(self) -> None:
        """All of this rank's shards are over. Raises PeerLost."""

    def step_abandoned(self) -> None:
        """Some of them never come."""
