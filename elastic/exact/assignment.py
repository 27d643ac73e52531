"""Assignment of shards to ranks. Pure: a function of the number of shards and the size of the world."""

from __future__ import annotations


def assign(shards: int, ranks: int) -> list[tuple[int, ...]]:
    """Return the shards of each rank, in ascending order. Ranks beyond the number of shards have none: warm spares.

    The numbers of shards differ by at most one. Each is split into powers of two, which are placed largest first. Every
    piece is therefore aligned to its length and is one node of the tree (see `elastic.exact.tree`), so a rank has
    few partials. A buddy allocator divides memory in the same way (Knowlton, CACM 1965).
    """
    if shards < 1 or ranks < 1:
        raise ValueError(
            f"{shards} shards can't be assigned to {ranks} ranks: both numbers must be at least 1"
        )
    least, larger = divmod(shards, ranks)
    sizes = [least + (rank < larger) for rank in range(ranks)]
    pieces = [
        (1 << bit, rank)
        for rank, size in enumerate(sizes)
        for bit in range(size.bit_length())
        if size >> bit & 1
    ]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    held: list[list[int]] = [[] for _ in range(ranks)]
    at = 0
    for size, rank in pieces:
        held[rank] += range(at, at + size)
        at += size
    return [tuple(each) for each in held]


def balance(shards: int, ranks: int) -> float:
    """Return the share of the ranks' time spent computing. 1.0 if no rank waits for others with more shards."""
    return shards / (ranks * -(-shards // ranks))
