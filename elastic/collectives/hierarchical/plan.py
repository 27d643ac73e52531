"""Decides who carries what when a group has several hosts with several ranks each. Pure.

Two networks are joined here: the memory of a host, and the wire between hosts. Every rank has the number of its host,
and its index on that host. What crosses the wire is carried by some of the ranks:

- Where all hosts have equally many ranks, every rank carries: the ranks with one index form an *inter-node group*, one
  rank of each host. A host's ranks all send at once, each its own share.
- Else the *leaders* carry, the ranks with index 0, for all of their host.

Ranks are numbered within the group, in any order on the hosts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_ALIGNED = 64  # elements: chunks begin at whole cache lines
AHEAD = 2  # chunks that are reduced on the host before the first has to be back from the wire

Parcel = tuple[int, int]  # what one rank sends to another: sender, receiver


@dataclass(frozen=True)
class Topology:
    """Where every rank of the group sits, seen by one of them."""

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts):
            raise ValueError(
                f"{self.hosts} are not hosts that share the ranks 0, 1, ... among them"
            )
        if self.rank not in self._ranks:
            raise ValueError(f"rank {self.rank} is on none of the hosts {self.hosts}")

    @cached_property
    def _ranks(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, index)
            for host, ranks in enumerate(self.hosts)
            for index, rank in enumerate(ranks)
        }

    def of(self, rank: int) -> tuple[int, int]:
        """The number of its host, and its index there."""
        return self._ranks[rank]

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def host(self) -> int:
        return self.of(self.rank)[0]

    @property
    def index(self) -> int:
        return self.of(self.rank)[1]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, itself among them, by index."""
        return self.hosts[self.host]

    @cached_property
    def even(self) -> bool:
        """Whether all hosts have equally many ranks, so that every rank carries."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def inter_node_group(self) -> int:
        """Which of the groups across hosts this rank would be in."""
        return self.index if self.even else 0

    @property
    def inter_node_ranks(self) -> tuple[int, ...]:
        """The ranks, by host, with which this one carries; none where its leader does."""
        if not self.even and self.index > 0:
            return ()
        return tuple(host[self.inter_node_group] for host in self.hosts)

    def behind(self, carrier: int) -> tuple[int, ...]:
        """For whom this one carries."""
        return (carrier,) if self.even else self.hosts[self.of(carrier)[0]]


# ---- allreduce -------------------------------------------------------------------------------------------------------


class Turn(enum.Enum):
    """What is done with a chunk, in this order."""

    REDUCE = enum.auto()  # started: among the ranks of the host
    CROSS = enum.auto()  # once it is reduced, started: among the hosts
    SPREAD = enum.auto()  # once it is back, started: from who carried it to the ranks of the host


def chunks(count: int, element_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Where the chunks of so many elements begin and end: equal ones, of ``chunk_bytes`` at most."""
    assert chunk_bytes % (_ALIGNED * element_bytes) == 0
    if count == 0:
        return []
    number = -(-count * element_bytes // chunk_bytes)
    length = -(-count // number)
    length = -(-length // _ALIGNED) * _ALIGNED
    return [(begin, min(begin + length, count)) for begin in range(0, count, length)]


def schedule(number: int, ahead: int = AHEAD) -> Iterator[tuple[Turn, int]]:
    """The turns of so many chunks: while some are on the wire, others are reduced and spread.

    Nothing in it depends on how fast anything goes, so the ranks of a host start the same in the same order.
    """
    for step in range(number + ahead):
        if step < number:
            yield Turn.REDUCE, step
        if 1 <= step <= number:
            yield Turn.CROSS, step - 1
        if step >= ahead:
            yield Turn.SPREAD, step - ahead


# ---- broadcast -------------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Where a rank receives from, or sends to, on the way of a broadcast; None: nothing to do."""

    first: int | None  # from this index, on this host, so that it comes to who carries
    cross: int | None  # from this host, across
    last: int | None  # from this index, on this host


def route(topology: Topology, root: int) -> Route:
    """The steps of a rank in the broadcast from ``root``."""
    host, index = topology.of(root)
    carrier = index if topology.even else 0
    collects = host == topology.host and index != carrier
    carries = topology.index == carrier
    return Route(
        first=index if collects else None,
        cross=host if carries else None,
        last=None if collects else carrier,
    )


# ---- alltoall --------------------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """One alltoall of several, among the ranks of a host or across hosts: what goes to and comes from each of them."""

    sent: list[list[Parcel]]
    received: list[list[Parcel]]


class Posting(NamedTuple):
    """The way of all parcels: to who carries, across, and to who receives. Two of them may not be needed."""

    collect: Exchange | None  # on the host
    cross: Exchange | None  # across
    deal: Exchange  # on the host


def posting(topology: Topology) -> Posting:
    """The steps of a rank in an alltoall. Parcels travel in order of sender and receiver, host by host."""
    everybody = [rank for host in topology.hosts for rank in host]
    own, mine = topology.rank, topology.local_ranks
    collect = None
    if not topology.even:
        to_leader: list[list[Parcel]] = [[] for _ in mine]
        to_leader[0] = _parcels([own], everybody)
        collected = [
            _parcels([each], everybody) if topology.inter_node_ranks else [] for each in mine
        ]
        collect = Exchange(to_leader, collected)
    cross = None
    if topology.inter_node_ranks:
        cross = Exchange(
            [_parcels(topology.behind(own), host) for host in topology.hosts],
            [_parcels(topology.behind(peer), mine) for peer in topology.inter_node_ranks],
        )

    def dealt(carrier: int, receiver: int) -> list[Parcel]:
        at = topology.of(carrier)[1]
        if not topology.even and at > 0:
            return []
        carried = [host[at] for host in topology.hosts]
        return [(s, receiver) for each in carried for s in topology.behind(each)]

    deal = Exchange(
        [dealt(own, neighbour) for neighbour in mine], [dealt(neighbour, own) for neighbour in mine]
    )
    return Posting(collect, cross, deal)


def _parcels(senders: Sequence[int], receivers: Sequence[int]) -> list[Parcel]:
    return [(sender, receiver) for sender in senders for receiver in receivers]
