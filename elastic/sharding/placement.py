"""Decides which ranks keep a copy of each shard's commit besides its owner. Pure.

A copy goes to a host that has none of this shard yet, if there is one: then as many hosts as there are copies can be
lost at once, adjacent or not. Among such ranks the one with the fewest copies is taken, so that all keep the same
number where hosts have the same number of ranks.

The memory of a rank may outlive it, because other processes of its host map it. Then the loss of a rank loses nothing,
and copies only go to other hosts.

Where several ranks own a shard, as replicas, each counts as a copy: a shard that enough of them hold has no other copy.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from elastic.sharding.device_mesh import columns

Placement = tuple[tuple[int, ...], ...]  # by shard, the ranks that keep a copy


def place_copies(
    order: Sequence[int],
    hosts: Sequence[str],
    copies: int,
    lasting: Sequence[bool] = (),
    shards: int | None = None,
) -> Placement:
    """Deterministic: every rank computes the same.

    Args:
        order: the rank at each place of a mesh of replicas by shards.
        hosts: the host of each rank.
        copies: of each shard besides the owner's; as many as there are other ranks, at most.
        lasting: whether the memory of each rank outlives it. Default: of none.
        shards: of the mesh. Default: each rank owns a shard of its own.
    """
    size = len(hosts)
    held_by = columns(order, shards or len(order))
    ranks_wanted, hosts_wanted = 1 + min(copies, size - 1), min(1 + copies, len({*hosts}))
    ring = sorted(range(size), key=lambda rank: (hosts[rank], rank))
    position = {rank: number for number, rank in enumerate(ring)}
    placed: list[tuple[int, ...]] = [() for _ in held_by]
    load = [0] * size
    for _ in range(min(copies, size - 1)):
        for shard in sorted(range(len(held_by)), key=lambda each: position[held_by[each][0]]):
            holding = (*held_by[shard], *placed[shard])
            used = {hosts[rank] for rank in holding}
            outlives = bool(lasting) and any(lasting[rank] for rank in held_by[shard])
            if len(used) >= hosts_wanted and (outlives or len(holding) >= ranks_wanted):
                continue
            best = min(
                (rank for rank in ring if rank not in holding),
                key=lambda rank: (
                    hosts[rank] in used,
                    load[rank],
                    (position[rank] - position[holding[0]]) % size,
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
