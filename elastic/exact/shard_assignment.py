"""Assignment of shards to ranks. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.exact import load_balancing


def assign(shards: int, ranks: int) -> list[tuple[int, ...]]:
    """Assign shards to ranks evenly: the numbers of shards per rank differ by at most one.

    If there are more ranks than shards, the last ranks get no shards and are warm spares. See `place`.
    """
    if shards < 1 or ranks < 1:
        raise ValueError(
            f"{shards} shards can't be assigned to {ranks} ranks: pass at least 1 for both"
        )
    return place(load_balancing.even(shards, ranks))


def place(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shards of each rank, in ascending order, given the number of shards of each rank.

    Each number is split into powers of two, which are placed largest first. Every piece is therefore aligned to its
    length and is one node of the reduction tree (see `elastic.exact.reduction_tree`), so a rank has few partial sums. A
    buddy allocator divides memory in the same way (Knowlton, CACM 1965).
    """
    pieces = [
        (1 << bit, rank)
        for rank, size in enumerate(sizes)
        for bit in range(size.bit_length())
        if size >> bit & 1
    ]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    held: list[list[int]] = [[] for _ in sizes]
    at = 0
    for size, rank in pieces:
        held[rank] += range(at, at + size)
        at += size
    return [tuple(each) for each in held]


def balance(shards: int, ranks: int) -> float:
    """Return the fraction of the ranks' time that is spent computing.

    It is 1.0 if no rank waits for ranks with more shards.
    """
    return shards / (ranks * -(-shards // ranks))
