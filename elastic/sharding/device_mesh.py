"""Shape of the device mesh (numbers of shards and replicas) with hybrid sharding (HSDP). Pure: no I/O, no clock.

Ranks form a mesh of replicas by shards, in row-major order: each row of ranks holds the complete state, and each column
holds one shard. Without replicas, the mesh has a single row and each rank has its own shard. ``order`` lists the rank
at each mesh position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic.errors import Invalid


class MeshShape(NamedTuple):
    """Shape of a mesh. The product of its fields is the number of ranks."""

    replicas: int
    shards: int


def mesh_shape(size: int, least: int) -> MeshShape:
    """Return the mesh shape with the most replicas that uses all ranks and has at least ``least`` shards.

    With a prime number of ranks, the mesh has a single replica, unless ``least`` is 1.

    Raises:
        Invalid: the world has fewer than ``least`` ranks.
    """
    for shards in range(max(1, least), size + 1):
        if size % shards == 0:
            return MeshShape(size // shards, shards)
    raise Invalid(
        f"the world has {size} ranks, but least_shards requires at least {least}: pass --min-np {least}"
    )


def columns(order: Sequence[int], shards: int) -> list[tuple[int, ...]]:
    """Return the ranks that hold each shard: one rank in each replica."""
    return [tuple(order[shard::shards]) for shard in range(shards)]


def sender(column: Sequence[int], shard: int) -> int:
    """Return the rank of a column that sends its shard to the ranks that keep a copy.

    Senders of different shards are in different rows, which spreads the work over the hosts.
    """
    return column[shard % len(column)]
