"""Decides into how many shards a world divides a state, and how many ranks hold each: hybrid sharding (HSDP). Pure.

Ranks lie in a mesh of replicas by shards, row by row: each row holds the whole state once, each column one shard. A
mesh of one row is that of a state in which each rank has a shard of its own. ``order`` is the rank at each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic.errors import Invalid


class MeshShape(NamedTuple):
    """``device_mesh * shards`` is the number of ranks."""

    replicas: int
    shards: int


def mesh_shape(size: int, least: int) -> MeshShape:
    """The most replicas of at least ``least`` shards that use all ranks. A prime number of ranks is one replica, unless
    ``least`` is 1. Raises Invalid where there are fewer ranks.
    """
    for shards in range(max(1, least), size + 1):
        if size % shards == 0:
            return MeshShape(size // shards, shards)
    raise Invalid(
        f"the world has {size} ranks, fewer than the {least} shards that least_shards asks for: give --min-np {least}"
    )


def columns(order: Sequence[int], shards: int) -> list[tuple[int, ...]]:
    """By shard, the ranks that hold it: one of each replica."""
    return [tuple(order[shard::shards]) for shard in range(shards)]


def sender(column: Sequence[int], shard: int) -> int:
    """The rank of a column that sends the shard to those that keep a copy. Shards have senders in different rows, so
    that no host sends everything.
    """
    return column[shard % len(column)]
