"""Assignment of shards to the ranks of one world. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.sharding.rows import owners


@dataclass(frozen=True)
class Division:
    """Assignment of a state's shards to the ranks of one world, with this rank's place in it.

    Args:
        order: the rank at each mesh position, row by row (replicas by shards).
        rank: this rank.
        shards: number of shards.
        replicated: whether the mesh has a dimension of replicas, even of size 1.
        unchanged: whether the previous world had the same ranks in the same, ascending order.
    """

    order: tuple[int, ...]
    rank: int
    shards: int
    replicated: bool = False
    unchanged: bool = False

    @classmethod
    def among(cls, order: Sequence[int], rank: int) -> Division:
        """Create a division with one shard per rank.

        Args:
            order: the rank of each shard.
        """
        return cls(tuple(order), rank, len(order))

    @property
    def shard(self) -> int:
        """Return the shard of this rank."""
        return owners(self.order, self.shards)[self.rank]
