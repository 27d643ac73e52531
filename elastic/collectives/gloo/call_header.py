"""First exchange of a collective: each rank sends a header that describes its call.

Gloo ends the process if a rank sends more than another expects, and returns wrong results if it sends less. Each
collective therefore begins with a message of variable length, and every receiver has room for the longest one. Its
header describes the rank's call, and all ranks compare the headers. If the rank's tensor is small, it follows the
header, and no second exchange is needed.
"""

from __future__ import annotations

import collections
import enum
import functools
import struct

import torch

# Measured with 2 to 8 ranks on loopback: up to this size in bytes, a direct exchange is at least as fast as a ring. If
# latency is high, it is much faster.
DIRECT_BYTES = 256 << 10  # maximum number of bytes that a rank sends directly to all others
DIRECT_RANKS = 32
_HEADER = struct.Struct("=BBHiq")
_ALIGNED = _HEADER.size  # The alignment is a multiple of the size of each reducible dtype.
_SPLITS = 2 * torch.int64.itemsize  # number of bytes of an alltoall's splits per rank
_SPARE = 4  # number of receive buffers kept for later exchanges


class CollectiveKind(enum.IntEnum):
    """Kinds of collectives that a header can describe."""

    ALLREDUCE = 1
    BROADCAST = 2
    ALLGATHER = 3
    ALLTOALL = 4
    BARRIER = 5


@functools.lru_cache(maxsize=1024)
def header(
    kind: CollectiveKind, nbytes: int = 0, *, dtype: int = 0, op: int = 0, root: int = 0
) -> Header:
    """Return the header of a call.

    Args:
        kind: kind of the collective.
        nbytes: size of each rank's contribution in bytes; for an alltoall, of one row.
        dtype: code of the dtype of a reduction.
        op: code of the operation of a reduction.
        root: rank that broadcasts.
    """
    return Header(_HEADER.pack(kind, op, dtype, root, nbytes), nbytes)


def splits(sent: list[int], received: list[int]) -> torch.Tensor:
    """Return the numbers of rows sent to and received from each rank in an alltoall, as int64 ``[2 * size]``."""
    return torch.tensor([*sent, *received], dtype=torch.int64, device="cpu")


def splits_agree(of_ranks: list[torch.Tensor]) -> bool:
    """Return whether the `splits` of all ranks agree on the number of rows between each pair of ranks."""
    sent, received = torch.stack(of_ranks).split(len(of_ranks), dim=1)
    return torch.equal(sent, received.T)


class Header:
    """Description of a call, as bytes that must be equal on all ranks."""

    def __init__(self, packed: bytes, nbytes: int) -> None:
        self.packed = packed
        self.nbytes = nbytes
        self.tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)


class FirstExchange:
    """State of the first exchanges in one group of ``size`` ranks: arguments for Gloo, and receive buffers."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        small = DIRECT_BYTES // size if size <= DIRECT_RANKS else 0
        self._row = _ALIGNED + -(-max(small, _SPLITS * size) // _ALIGNED) * _ALIGNED
        self._small = small
        self._received = self._splits(self._row)
        self._spare: collections.deque[Places] = collections.deque(maxlen=_SPARE)

    def fits(self, nbytes: int) -> bool:
        """Return whether a tensor of ``nbytes`` bytes is small enough to be sent with the header.

        The result is equal on all ranks.
        """
        return nbytes <= self._small

    def begin(
        self, header: Header, payload: torch.Tensor | None
    ) -> tuple[Places, torch.Tensor, list[int], list[int]]:
        """Prepare the exchange of a header and ``payload``, a 1-d uint8 tensor, with every other rank.

        Returns:
            The receive buffers, the bytes to send to all ranks one after another, and the numbers of received and sent
            bytes by rank.
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
    """Receive buffers of one exchange, with one row for each other rank."""

    def __init__(self, rank: int, size: int, row: int) -> None:
        self.flat = torch.empty((size - 1) * row, dtype=torch.uint8, device="cpu")
        self._bytes = self.flat.numpy().data
        self._row = row
        # Offset of each rank's row; None for this rank.
        self._begins = [None if r == rank else (r - (r > rank)) * row for r in range(size)]

    def agree(self, header: Header) -> bool:
        """Return whether every other rank sent the same header."""
        packed, found, length = header.packed, self._bytes, _HEADER.size
        return all(
            found[begin : begin + length] == packed for begin in range(0, len(found), self._row)
        )

    def payloads(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's payload with the dtype and length of ``own``, this rank's flat payload."""
        nbytes = own.nbytes
        return [
            own
            if begin is None
            else self.flat[begin + _ALIGNED : begin + _ALIGNED + nbytes].view(own.dtype)
            for begin in self._begins
        ]
