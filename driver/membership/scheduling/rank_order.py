"""Assignment of ranks. Pure: no I/O, no clock.

Survivors keep their order, except that holders of the newest commit have the lowest ranks: rank 0 holds the commit, and
the ranks that lack it are contiguous at the end. Two numbers therefore suffice to tell each member which ranks hold the
commit, regardless of the size of the world.
"""

from __future__ import annotations

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


def places(order: Sequence[Worker]) -> list[Place]:
    """Return the place of each worker: its ranks and the sizes.

    The local rank is the slot number, because survivors cannot switch to another GPU.
    """
    size, hosts, slots = len(order), [w.host for w in order], [w.slot for w in order]
    on_host = Counter(hosts)
    hosts_of_slot: dict[int, list[str]] = {}
    for host, slot in zip(hosts, slots, strict=True):
        hosts_of_slot.setdefault(slot, []).append(host)
    cross = {slot: {h: i for i, h in enumerate(found)} for slot, found in hosts_of_slot.items()}
    # Positional arguments, because keyword arguments take longer.
    return [
        Place(rank, size, slot, on_host[host], (on_slot := cross[slot])[host], len(on_slot))
        for rank, (host, slot) in enumerate(zip(hosts, slots, strict=True))
    ]


def next_place(members: Sequence[Worker], worker: Worker) -> Place:
    """Return the place that `places` would assign to a worker at the end of the order."""
    on_host = sum(1 for m in members if m.host == worker.host)
    hosts = {m.host for m in members if m.slot == worker.slot and m.host != worker.host}
    size = len(members) + 1
    return Place(len(members), size, worker.slot, on_host + 1, len(hosts), len(hosts) + 1)


def slots(hosts: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Yield all slots, host by host, in the order of the discovery's list."""
    for host, count in hosts.items():
        for slot in range(count):
            yield host, slot
