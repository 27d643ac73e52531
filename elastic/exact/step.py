"""One step of a fixed number of shards, and its listeners. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from elastic.exact import tree


class PassResult(NamedTuple):
    """Gradients of one shard, as one rank has computed them.

    Attributes:
        digest: 0 without any.
        largest: the largest absolute value; infinity if one is infinite or NaN, 0.0 without any.
    """

    digest: int
    largest: float


class ShardStep(NamedTuple):
    """One step, from the view of this rank."""

    number: int
    held: tuple[tuple[int, ...], ...]  # the shards that each rank computes
    rank: int
    merges: list[tree.Merge]  # operations to run after each of this rank's shards
    partials: list[list[tree.Node]]  # partials that remain on each rank


class StepListener(Protocol):
    """Receives the events of a step. Listeners are called in the order in which they were added."""

    def step_begins(self, step: ShardStep) -> None: ...

    def shard_begins(self, merge: tree.Merge, last: bool) -> None:
        """Begin a shard.

        Args:
            last: whether this is the last of this rank's shards.
        """

    def shard_ends(self, shard: int) -> None: ...

    def step_ends(self) -> None:
        """Finish the step after all shards of this rank. Raises PeerLost."""

    def step_abandoned(self) -> None:
        """Discard an incomplete step."""

    def second_pass_begins(self, shard: int) -> None:
        """Begin to compute a shard again, after this rank's own, for a comparison. See `elastic.exact.verifier`."""

    def second_pass_ends(self, shard: int) -> PassResult:
        """End the second pass without a trace, and return its result."""

    def digest_of(self, shard: int) -> int:
        """Return the same digest of one of this rank's own shards that `Shards.checked` contains."""

    def largest(self, shard: int) -> float:
        """Return the same of one of this rank's own shards, if shards are verified."""
