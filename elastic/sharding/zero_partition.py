"""Assignment of whole parameters to shards, as in torch's ZeroRedundancyOptimizer. Pure: no I/O, no clock.

In each parameter group, parameters are assigned in descending order of size, each to the shard with the fewest elements
so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.sharding.row_layout import Rows, ShardedTensor


@dataclass(frozen=True)
class Partition:
    """Assignment of whole parameters to shards.

    Args:
        groups: number of elements of each parameter, by parameter group.
    """

    groups: tuple[tuple[int, ...], ...]
    _known: dict[int, tuple[int, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def owners(self, shards: int) -> tuple[int, ...]:
        """Return the shard of each parameter. Parameters are numbered consecutively across the groups."""
        found = self._known.get(shards)
        if found is None:
            found = self._known[shards] = _divided(self.groups, shards)
        return found


def _divided(groups: Sequence[Sequence[int]], shards: int) -> tuple[int, ...]:
    loads = [0] * shards
    found: list[int] = []
    for sizes in groups:
        shard_of = {}
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            shard = loads.index(min(loads))
            loads[shard] += sizes[number]
            shard_of[number] = shard
        found += [shard_of[number] for number in range(len(sizes))]
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class PartitionedTensor(ShardedTensor):
    """Tensor that one shard holds entirely: the shard of the parameter ``number``."""

    partition: Partition
    number: int

    def rows_of(self, shard: int, shards: int) -> Rows:
        owned = self.partition.owners(shards)[self.number] == shard
        return Rows(0, self.rows if owned else 0)

    def shards_with(self, wanted: Rows, shards: int) -> Sequence[int]:
        return (self.partition.owners(shards)[self.number],) if len(wanted) else ()
