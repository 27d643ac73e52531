"""What each rank tells every other at the beginning of a collective: which one it is, and what is small enough itself.

Gloo ends the process where a rank sends more than another expects, and gives wrong numbers where it sends less. So each
collective begins with a message whose length may differ: room is made for the longest one. Its header says what the
rank has called, and all compare. What follows the header is the rank's tensor, if it is small: then there is no second
exchange.
"""

from __future__ import annotations

import collections
import enum
import functools
import struct

import torch

# Measured with 2 to 8 ranks on loopback: up to here it is as fast as a ring or faster, and over a long way much faster.
DIRECT_BYTES = 256 << 10  # that a rank sends
DIRECT_RANKS = 32
_HEADER = struct.Struct("=BBHiq")
_ALIGNED = _HEADER.size  # a multiple of the size of each dtype that is reduced
_SPLITS = 2 * torch.int64.itemsize  # bytes that an alltoall's splits take for each rank
_SPARE = 4  # places that are kept for the next exchanges


class CollectiveKind(enum.IntEnum):
    """Which collective."""

    ALLREDUCE = 1
    BROADCAST = 2
    ALLGATHER = 3
    ALLTOALL = 4
    BARRIER = 5


@functools.lru_cache(maxsize=1024)
def header(
    kind: CollectiveKind, nbytes: int = 0, *, dtype: int = 0, op: int = 0, root: int = 0
) -> Header:
    """``nbytes``: of what each rank gives; of an alltoall, of one row. ``dtype`` and ``op`` are of what is reduced."""
    return Header(_HEADER.pack(kind, op, dtype, root, nbytes), nbytes)


def splits(sent: list[int], received: list[int]) -> torch.Tensor:
    """What a rank gives to each in an alltoall, then what it takes from each, in rows: int64 ``[2 * size]``."""
    return torch.tensor([*sent, *received], dtype=torch.int64, device="cpu")


def splits_agree(of_ranks: list[torch.Tensor]) -> bool:
    """Whether each rank takes from each what that one gives it, by the `splits` of all ranks."""
    sent, received = torch.stack(of_ranks).split(len(of_ranks), dim=1)
    return torch.equal(sent, received.T)


class Header:
    """What has to be equal on all ranks, as bytes."""

    def __init__(self, packed: bytes, nbytes: int) -> None:
        self.packed = packed
        self.nbytes = nbytes
        self.tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)


class FirstExchange:
    """Of one group of ``size`` ranks: what Gloo is given for it, and the places for what comes."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        small = DIRECT_BYTES // size if size <= DIRECT_RANKS else 0
        self._row = _ALIGNED + -(-max(small, _SPLITS * size) // _ALIGNED) * _ALIGNED
        self._small = small
        self._received = self._splits(self._row)
        self._spare: collections.deque[Places] = collections.deque(maxlen=_SPARE)

    def fits(self, nbytes: int) -> bool:
        """Whether a tensor of so many bytes travels with the header. The same on every rank."""
        return nbytes <= self._small

    def begin(
        self, header: Header, payload: torch.Tensor | None
    ) -> tuple[Places, torch.Tensor, list[int], list[int]]:
        """For every other rank the header and ``payload``, flat bytes: where to put theirs, what is sent to them all,
        one after another, and how many bytes of both belong to each rank.
        """
        mine = header.tensor if payload is None else torch.cat((header.tensor, payload))
        sent = self._splits(mine.numel())
        if self._size > 2:
            mine = mine.repeat(self._size - 1)
        places = self._spare.popleft() if self._spare else Places(self._rank, self._size, self._row)
        return places, mine, self._received, sent

    def give_back(self, places: Places) -> None:
        self._spare.append(places)

    def _splits(self, nbytes: int) -> list[int]:
        splits = [nbytes] * self._size
        splits[self._rank] = 0
        return splits


class Places:
    """Where one exchange puts what the others say: a row of each other rank."""

    def __init__(self, rank: int, size: int, row: int) -> None:
        self.flat = torch.empty((size - 1) * row, dtype=torch.uint8, device="cpu")
        self._bytes = self.flat.numpy().data
        self._row = row
        # Of each rank, the beginning of its row; None is this one.
        self._begins = [None if r == rank else (r - (r > rank)) * row for r in range(size)]

    def agree(self, header: Header) -> bool:
        """Whether every other rank has called the same."""
        packed, found, length = header.packed, self._bytes, _HEADER.size
        return all(
            found[begin : begin + length] == packed for begin in range(0, len(found), self._row)
        )

    def payloads(self, own: torch.Tensor) -> list[torch.Tensor]:
        """What each rank gave, by rank, as ``own``, flat, which is this one's: dtype and length."""
        nbytes = own.nbytes
        return [
            own
            if begin is None
            else self.flat[begin + _ALIGNED : begin + _ALIGNED + nbytes].view(own.dtype)
            for begin in self._begins
        ]
