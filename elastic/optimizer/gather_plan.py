"""Which parts of which parameters are gathered together, once each rank has stepped its elements of them. Pure.

A shard's elements of a parameter are cut into slices, so that a buffer of a fixed size is enough whatever the model's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from elastic.sharding.rows import Rows, rows_of


class Slice(NamedTuple):
    """Of the elements that each shard has of a parameter: ``begin`` up to ``end``, counted within the shard."""

    parameter: int
    begin: int
    end: int

    def of(self, shard: int, elements: int, shards: int) -> Rows:
        """The elements of the flat parameter that are the slice's in this shard; the last shards have fewer."""
        own = rows_of(elements, shard, shards)
        return Rows(min(own.begin + self.begin, own.end), min(own.begin + self.end, own.end))


@functools.lru_cache(maxsize=16)
def gathers(elements: tuple[int, ...], shards: int, limit: int) -> list[list[Slice]]:
    """Every element of every parameter once, in order. ``limit``: elements of a shard in one gather."""
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
