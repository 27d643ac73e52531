"""Data of a step that is divided into shards, and the interface of its listeners. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from elastic.exact import reduction_tree


class PassResult(NamedTuple):
    """Summary of the gradients of one shard, as computed by one rank.

    Attributes:
        digest: digest of the gradients; 0 if there are none.
        largest: largest absolute value of the gradients; infinity if a value is infinite or NaN, 0.0 if there are no
            gradients.
    """

    digest: int
    largest: float


class ShardStep(NamedTuple):
    """Assignment of one step's shards to ranks, and the operations that merge this rank's shards."""

    number: int
    held: tuple[tuple[int, ...], ...]  # the shards that each rank computes
    rank: int
    merges: list[reduction_tree.Merge]  # merge operations after each of this rank's shards
    partials: list[list[reduction_tree.Node]]  # partial sums that remain on each rank


class StepListener(Protocol):
    """Interface that receives the events of a step. Listeners are called in the order in which they were added."""

    def step_begins(self, step: ShardStep) -> None: ...

    def shard_begins(self, merge: reduction_tree.Merge, last: bool) -> None:
        """Handle the beginning of a shard.

        Args:
            merge: operations on the stack of partial sums after this shard.
            last: whether this is the last of this rank's shards.
        """

    def shard_ends(self, shard: int) -> None: ...

    def step_ends(self) -> None:
        """Finish the step after all shards of this rank. Raises PeerLost if a rank was lost."""

    def step_abandoned(self) -> None:
        """Discard the step that was not completed."""

    def second_pass_begins(self, shard: int) -> None:
        """Begin the second computation of a shard for a comparison, after this rank's own shards.

        See `elastic.exact.verifier`.
        """

    def second_pass_ends(self, shard: int) -> PassResult:
        """End the second pass, restore the gradients from before it, and return its result."""

    def digest_of(self, shard: int) -> int:
        """Return the digest of the gradients of one of this rank's own shards.

        This method is called only for shards in `Shards.checked`.
        """

    def largest(self, shard: int) -> float:
        """Return the largest absolute gradient of one of this rank's own shards, if shards are verified."""

    def state_of(self, shard: int) -> dict[str, Any]:
        """Return the tensors from which a shard's gradients were computed, and digests of the gradients.

        The values can be saved with `torch.save` and loaded with ``weights_only=True``.
        """
