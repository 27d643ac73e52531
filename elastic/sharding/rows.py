"""Which rows of a tensor each shard has, and where they lie in the shard's bytes. Pure.

Rows follow torch.chunk's rule, as in FSDP2: ``ceil(rows / shards)`` per shard; the last shards are shorter or empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Bytes; the rows of each tensor begin at a multiple of it, so that any dtype can be viewed in place.
ALIGNMENT = 64


class Rows(NamedTuple):
    """``begin`` up to, not including, ``end``."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def rows_of(rows: int, shard: int, shards: int) -> Rows:
    """The rows of one shard of a tensor with so many rows."""
    length = -(-rows // shards)
    return Rows(min(shard * length, rows), min((shard + 1) * length, rows))


def overlap(one: Rows, other: Rows) -> Rows:
    """Empty where they have no row in common."""
    begin = max(one.begin, other.begin)
    return Rows(begin, max(begin, min(one.end, other.end)))


def shards_with(wanted: Rows, rows: int, shards: int) -> range:
    """The shards of a tensor with so many rows that have one of the rows ``wanted``."""
    if not len(wanted):
        return range(0)
    length = -(-rows // shards)
    return range(wanted.begin // length, (wanted.end - 1) // length + 1)


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor that is sharded by rows: along its first dimension."""

    name: str
    rows: int
    row_bytes: int

    def rows_of(self, shard: int, shards: int) -> Rows:
        """The rows of one shard."""
        return rows_of(self.rows, shard, shards)

    def shards_with(self, wanted: Rows, shards: int) -> Sequence[int]:
        """The shards that have one of the rows ``wanted``."""
        return shards_with(wanted, self.rows, shards)


@dataclass(frozen=True)
class ShardLayout:
    """How the bytes of a state are divided into shards: every tensor in order, each at a multiple of `ALIGNMENT`."""

    tensors: tuple[ShardedTensor, ...]
    shards: int

    def rows(self, tensor: ShardedTensor, shard: int) -> Rows:
        return tensor.rows_of(shard, self.shards)

    def offsets(self, shard: int) -> list[int]:
        """Where each tensor begins in the bytes of the shard, and at the end their number."""
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
        """Bytes of the largest shard."""
        return max(map(self.nbytes, range(self.shards)))

    @cached_property
    def digest(self) -> int:
        """63 bits; equal on ranks that divide the same tensors in the same way."""
        text = repr((self.shards, [(t.name, t.rows, t.row_bytes) for t in self.tensors]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def pieces(rows: Rows, row_bytes: int, limit: int) -> Iterator[Rows]:
    """The same rows in order, cut so that each piece has ``limit`` bytes at most, or one row."""
    step = max(1, limit // max(1, row_bytes))
    for begin in range(rows.begin, rows.end, step):
        yield Rows(begin, min(begin + step, rows.end))


def owners(order: Sequence[int], shards: int | None = None) -> dict[int, int]:
    """The shard of each rank. ``order``: the rank at each place of a mesh of replicas by ``shards``; without replicas,
    the rank of each shard.
    """
    return {rank: place % (shards or len(order)) for place, rank in enumerate(order)}
