"""Decides which ranks keep a copy of each shard's commit besides its owner. Pure.

A copy goes to a host that has none of this shard yet, if there is one: then as many hosts as there are copies can be
lost at once, adjacent or not. Among such ranks the one with the fewest copies is taken, so that all keep the same
number where hosts have the same number of ranks.

The memory of a rank may outlive it, because other processes of its host map it. Then the loss of a rank loses nothing,
and copies only go to other hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

Placement = tuple[tuple[int, ...], ...]  # by shard, the ranks that keep a copy


def place_copies(
    order: Sequence[int], hosts: Sequence[str], copies: int, lasting: Sequence[bool] = ()
) -> Placement:
    """Deterministic: every rank computes the same.

    Args:
        order: the rank that owns each shard.
        hosts: the host of each rank.
        copies: of each shard besides the owner's; as many as there are other ranks, at most.
        lasting: whether the memory of each rank outlives it. Default: of none.
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
            if lasting and lasting[order[shard]] and used == {*hosts}:
                continue
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


def lasting(machines: Sequence[Hashable], reached: Sequence[Collection[int]]) -> list[bool]:
    """Whether the memory of each rank outlives it: there are other ranks on its machine, and all of them map it.

    Args:
        machines: of each rank; None if it offers no memory.
        reached: the ranks whose memory each rank maps.
    """
    found = []
    for rank, machine in enumerate(machines):
        others = [n for n, each in enumerate(machines) if each == machine and n != rank]
        alike = machine is not None and bool(others)
        found.append(alike and all(rank in reached[other] for other in others))
    return found


def copied_to(placement: Placement, rank: int) -> list[int]:
    """The shards of which a rank keeps a copy."""
    return [shard for shard, ranks in enumerate(placement) if rank in ranks]
