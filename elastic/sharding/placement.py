"""Decides which ranks keep a copy of each shard's commit besides its owner. Pure.

A copy goes to a host that has none of this shard yet, if there is one: then as many hosts as there are copies can be
lost at once, adjacent or not. Among such ranks the one with the fewest copies is taken, so that all keep the same
number where hosts have the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

Placement = tuple[tuple[int, ...], ...]  # by shard, the ranks that keep a copy


def place_copies(order: Sequence[int], hosts: Sequence[str], copies: int) -> Placement:
    """Deterministic: every rank computes the same.

    Args:
        order: the rank that owns each shard.
        hosts: the host of each rank.
        copies: of each shard besides the owner's; as many as there are other ranks, at most.
    """
    size = len(hosts)
    ring = sorted(range(size), key=lambda rank: (hosts[rank], rank))
    position = {rank: number for number, rank in enumerate(ring)}
    placed: list[tuple[int, ...]] = [() for _ in order]
    load = [0] * size
    for _ in range(min(copies, size - 1)):
        for shard in sorted(range(len(order)), key=lambda each: position[order[each]]):
            holding = (order[shard], *placed[shard])
            used = {hosts[rank] for rank in holding}
            best = min(
                (rank for rank in ring if rank not in holding),
                key=lambda rank: (
                    hosts[rank] in used,
                    load[rank],
                    (position[rank] - position[order[shard]]) % size,
                ),
            )
            load[best] += 1
            placed[shard] = (*placed[shard], best)
    return tuple(placed)


def copied_to(placement: Placement, rank: int) -> list[int]:
    """The shards of which a rank keeps a copy."""
    return [shard for shard, ranks in enumerate(placement) if rank in ranks]
