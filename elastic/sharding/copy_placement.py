"""Placement of copies of each rank's shard on other ranks. Pure: no I/O, no clock.

If possible, each copy of a shard is placed on a host that has no copy of it yet. With n copies, any n hosts can then
fail at the same time. Among the eligible ranks, the one with the fewest copies is chosen. If all hosts have the same
number of ranks, all ranks keep the same number of copies.

The memory of a rank outlives its process if other processes on the host map it. The loss of such a process loses no
data, so copies of its shard are useful only on other hosts and placed only there.

If several ranks own a shard, as replicas, each of them counts as a copy. No further copies are placed if a shard has
enough replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from elastic.sharding.device_mesh import columns

Placement = tuple[tuple[int, ...], ...]  # ranks that keep a copy, for each shard


def place_copies(
    order: Sequence[int],
    hosts: Sequence[str],
    copies: int,
    lasting: Sequence[bool] = (),
    shards: int | None = None,
) -> Placement:
    """Return the ranks that keep a copy of each shard. Deterministic, so that all ranks compute the same placement.

    Args:
        order: rank at each position of the mesh of replicas by shards.
        hosts: host of each rank.
        copies: number of copies of each shard in addition to the owner's, limited to the number of other ranks.
        lasting: whether the memory of each rank outlives its process (default: False for all ranks).
        shards: number of shards of the mesh (default: each rank has its own shard).
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
    """Return, for each rank, whether its memory outlives its process.

    The memory outlives the process if there are other ranks on the same machine and all of them map it.

    Args:
        machines: machine of each rank, or None if the rank offers no memory.
        reached: ranks whose memory each rank maps.
    """
    found = []
    for rank, machine in enumerate(machines):
        others = [n for n, each in enumerate(machines) if each == machine and n != rank]
        alike = machine is not None and bool(others)
        found.append(alike and all(rank in reached[other] for other in others))
    return found


def copied_to(placement: Placement, rank: int) -> list[int]:
    """Return the shards that a rank keeps copies of."""
    return [shard for shard, ranks in enumerate(placement) if rank in ranks]
