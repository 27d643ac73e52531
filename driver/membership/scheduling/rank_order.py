"""Assignment of ranks. Pure: no I/O, no clock.

Survivors keep their order, except that holders of the newest commit have the lowest ranks: rank 0 holds the commit, and
the ranks that lack it are contiguous at the end. Two numbers therefore suffice to tell each member which ranks hold the
commit, regardless of the size of the world.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.protocol.messages import Commit, Place, Worker

COPIES_LIMIT = 256  # maximum number of ranks whose senders are listed


@dataclass(frozen=True)
class RankOrder:
    """Order of the workers in a world.

    A worker's rank is its index in ``order``. The ranks below ``holders`` hold ``commit``.
    """

    order: list[Worker]
    holders: int
    commit: Commit | None


def arrange(
    survivors: Sequence[Worker],
    newcomers: Sequence[Worker],
    commits: Mapping[Worker, Commit | None],
) -> RankOrder:
    """Return the rank order for a new world.

    Args:
        survivors: workers of the last world, in their old order.
        newcomers: workers that join, in order. They follow the survivors and are never the source of the state.
        commits: newest commit of each worker. If no survivor has committed, ``holders`` is 0 and the first survivor is
            the source.
    """
    held = [*map(commits.get, survivors)]
    newest = newest_of(held)
    if newest is None:
        return RankOrder([*survivors, *newcomers], 0, None)
    holders = [w for w, commit in zip(survivors, held, strict=True) if commit == newest]
    lacking: list[Worker] = []
    if len(holders) < len(held):
        lacking = [w for w, commit in zip(survivors, held, strict=True) if commit != newest]
    return RankOrder([*holders, *lacking, *newcomers], len(holders), newest)


def newest_of(commits: Sequence[Commit | None]) -> Commit | None:
    """Return the newest of these commits, or None if there is none."""
    # Comparing commits is slow. The workers of a host share one object if their reports were merged.
    distinct = dict(zip(map(id, commits), commits, strict=True)).values()
    return max((commit for commit in distinct if commit is not None), default=None)


def copy_groups(order: Sequence[Worker], holders: int) -> list[list[int]]:
    """Return the groups of ranks in which the state is sent to the ranks that lack it: a sender, then its receivers.

    A rank receives the state from a holder on its own host, if there is one, or else from rank 0.

    Args:
        order: the workers in rank order.
        holders: number of ranks that hold the newest commit.

    Returns:
        The groups, or an empty list if rank 0 sends the state to all receivers. The list is also empty with more than
        `COPIES_LIMIT` receivers, because every worker receives it.
    """
    receivers = range(max(1, holders), len(order))
    if not holders or not 0 < len(receivers) <= COPIES_LIMIT:
        return []
    senders: dict[str, int] = {}
    for rank in range(holders):
        senders.setdefault(order[rank].host, rank)
    groups: dict[int, list[int]] = {}
    for rank in receivers:
        groups.setdefault(senders.get(order[rank].host, 0), []).append(rank)
    return [] if groups.keys() == {0} else [[sender, *groups[sender]] for sender in sorted(groups)]


def places(order: Sequence[Worker], first: int = 0) -> list[Place]:
    """Return the place of each worker from rank ``first`` on: its ranks and the sizes.

    The local rank is the slot number, because survivors cannot switch to another GPU.
    """
    size, hosts, slots = len(order), [w.host for w in order], [w.slot for w in order]
    # Most of this runs in C, because a job may have 100,000 workers.
    on_host, on_slot = Counter(hosts), Counter(slots)
    following = {slot: itertools.count() for slot in on_slot}
    cross = [*map(next, map(following.__getitem__, slots))]
    # The order may contain two workers of one slot: a lost one and its replacement. Both have the last cross rank.
    of_slot = dict(zip(zip(hosts, slots, strict=True), cross, strict=True))
    if len(of_slot) < size:
        cross = [*map(of_slot.__getitem__, zip(hosts, slots, strict=True))]
        on_slot = Counter(slot for _, slot in of_slot)
    hosts, slots = hosts[first:], slots[first:]
    local_sizes, cross_sizes = map(on_host.__getitem__, hosts), map(on_slot.__getitem__, slots)
    ranks, sizes = range(first, size), itertools.repeat(size)
    return [*map(Place, ranks, sizes, slots, local_sizes, cross[first:], cross_sizes)]


def next_place(members: Sequence[Worker], worker: Worker) -> Place:
    """Return the place that `places` would assign to a worker at the end of the order, after the other members."""
    on_host = [member.host for member in members].count(worker.host)
    if on_host and worker in members:
        return next_place([member for member in members if member != worker], worker)
    slot = worker.slot
    hosts = {member.host for member in members if member.slot == slot}
    hosts.discard(worker.host)
    size = len(members) + 1
    return Place(len(members), size, slot, on_host + 1, len(hosts), len(hosts) + 1)


def slots(hosts: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Yield all slots, host by host, in the order of the discovery's list."""
    for host, count in hosts.items():
        for slot in range(count):
            yield host, slot
