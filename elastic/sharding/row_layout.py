"""Division of tensors into shards by rows, and the layout of a shard's bytes. Pure: no I/O, no clock.

Rows follow torch.chunk's rule, as in FSDP2: ``ceil(rows / shards)`` per shard. The last shards are shorter or
empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# bytes; each tensor begins at a multiple of it, so that any dtype can be viewed in place
ALIGNMENT = 64


class Rows(NamedTuple):
    """Range of rows, from ``begin`` (inclusive) to ``end`` (exclusive)."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def rows_of(rows: int, shard: int, shards: int) -> Rows:
    """Return the rows in one shard of a tensor that has ``rows`` rows."""
    length = -(-rows // shards)
    return Rows(min(shard * length, rows), min((shard + 1) * length, rows))


def overlap(one: Rows, other: Rows) -> Rows:
    """Return the intersection of two ranges of rows. It may be empty."""
    begin = max(one.begin, other.begin)
    return Rows(begin, max(begin, min(one.end, other.end)))


def shards_with(wanted: Rows, rows: int, shards: int) -> range:
    """Return the indices of the shards that contain any of the ``wanted`` rows of a tensor."""
    if not len(wanted):
        return range(0)
    length = -(-rows // shards)
    return range(wanted.begin // length, (wanted.end - 1) // length + 1)


@dataclass(frozen=True)
class ShardedTensor:
    """Tensor that is sharded along its first dimension."""

    name: str
    rows: int
    row_bytes: int

    def rows_of(self, shard: int, shards: int) -> Rows:
        """Return the rows of this tensor in one shard."""
        return rows_of(self.rows, shard, shards)

    def shards_with(self, wanted: Rows, shards: int) -> Sequence[int]:
        """Return the indices of the shards that contain any of the ``wanted`` rows."""
        return shards_with(wanted, self.rows, shards)


@dataclass(frozen=True)
class ShardLayout:
    """Layout of a state's bytes in shards: all tensors in order, each at a multiple of `ALIGNMENT`."""

    tensors: tuple[ShardedTensor, ...]
    shards: int

    def rows(self, tensor: ShardedTensor, shard: int) -> Rows:
        return tensor.rows_of(shard, self.shards)

    def offsets(self, shard: int) -> list[int]:
        """Return the offset in bytes of each tensor in a shard, followed by the size of the shard."""
        found, at = [], 0
        for tensor in self.tensors:
            found.append(at)
            size = len(self.rows(tensor, shard)) * tensor.row_bytes
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return [*found, at]

    def nbytes(self, shard: int) -> int:
        return self.offsets(shard)[-1]

    @cached_property
    def largest(self) -> int:
        """Return the size in bytes of the largest shard."""
        return max(map(self.nbytes, range(self.shards)))

    @cached_property
    def digest(self) -> int:
        """Return a 63-bit digest of the layout, equal on ranks with the same tensors and number of shards."""
        text = repr((self.shards, [(t.name, t.rows, t.row_bytes) for t in self.tensors]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def pieces(rows: Rows, row_bytes: int, limit: int) -> Iterator[Rows]:
    """Split a range of rows, in order, into pieces of at most ``limit`` bytes or of a single row."""
    step = max(1, limit // max(1, row_bytes))
    for begin in range(rows.begin, rows.end, step):
        yield Rows(begin, min(begin + step, rows.end))


def owners(order: Sequence[int], shards: int | None = None) -> dict[int, int]:
    """Return the shard that each rank owns.

    Args:
        order: rank at each position of the mesh of replicas by shards.
        shards: number of shards of the mesh (default: each rank has its own shard).
    """
    return {rank: place % (shards or len(order)) for place, rank in enumerate(order)}
