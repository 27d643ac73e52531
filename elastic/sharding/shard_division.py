"""Assignment of shards to the ranks of one world. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.sharding.row_layout import owners


@dataclass(frozen=True)
class Division:
    """Assignment of a state's shards to the ranks of one world, as seen from one rank.

    Args:
        order: rank at each position of the mesh (replicas by shards), row by row.
        rank: this rank.
        shards: number of shards.
        replicated: whether the mesh has a replica dimension, even of size 1.
        unchanged: whether the ranks are in ascending order, and are the same as in the previous world.
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
            order: rank of each shard, in shard order.
        """
        return cls(tuple(order), rank, len(order))

    @property
    def shard(self) -> int:
        """Return the shard that this rank holds."""
        return owners(self.order, self.shards)[self.rank]
