"""Plan of the gathers that send the elements updated by each rank to all ranks. Pure: no I/O, no clock.

The elements of each parameter are cut into slices, so that a buffer of fixed size suffices for models of any size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from elastic.sharding.row_layout import Rows, rows_of


class Slice(NamedTuple):
    """Elements ``begin`` to ``end`` (exclusive) of every shard's part of a parameter, counted within the shard."""

    parameter: int
    begin: int
    end: int

    def of(self, shard: int, elements: int, shards: int) -> Rows:
        """Return the range of a flattened parameter's elements that the slice covers in a shard.

        The last shards have fewer elements.
        """
        own = rows_of(elements, shard, shards)
        return Rows(min(own.begin + self.begin, own.end), min(own.begin + self.end, own.end))


@functools.lru_cache(maxsize=16)
def gathers(elements: tuple[int, ...], shards: int, limit: int) -> list[list[Slice]]:
    """Assign all elements of all parameters, in order, to gathers.

    Args:
        elements: number of elements of each parameter.
        shards: number of shards.
        limit: maximum number of elements per shard and gather.

    Returns:
        The slices of each gather. Together they contain every element exactly once.
    """
    found: list[list[Slice]] = [[]]
    room = limit
    for parameter, count in enumerate(elements):
        largest = len(rows_of(count, 0, shards))
        begin = 0
        while begin < largest:
            end = min(largest, begin + room)
            found[-1].append(Slice(parameter, begin, end))
            room -= end - begin
            begin = end
            if not room:
                found.append([])
                room = limit
    return [each for each in found if each]
