"""The shards of one world and the ranks that have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.sharding.rows import owners


@dataclass(frozen=True)
class Division:
    """How a world divides a state into shards.

    Args:
        order: the rank at each place of a mesh of replicas by shards.
        rank: this rank.
        shards: number of shards.
        replicated: whether the mesh has a dimension of replicas, even of size 1.
        unchanged: whether the world before had all ranks in this same order, which is ascending.
    """

    order: tuple[int, ...]
    rank: int
    shards: int
    replicated: bool = False
    unchanged: bool = False

    @classmethod
    def among(cls, order: Sequence[int], rank: int) -> Division:
        """Each rank has a shard of its own. ``order``: the rank of each shard."""
        return cls(tuple(order), rank, len(order))

    @property
    def shard(self) -> int:
        """The shard of this rank."""
        return owners(self.order, self.shards)[self.rank]
