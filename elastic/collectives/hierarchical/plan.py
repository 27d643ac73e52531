"""Communication plan of collectives over several hosts with several ranks each. Pure: no I/O, no clock.

A rank communicates through its host's memory and through the network between hosts. Hosts are numbered, and each rank
has an index on its host. Some of the ranks, the carriers, send data between hosts:

- If all hosts have the same number of ranks, every rank is a carrier: the ranks with the same index form an *inter-node
  group*, with one rank of each host. All ranks of a host send at the same time, each its own share.
- Otherwise the *leaders*, the ranks with index 0, send for all ranks of their host.

Ranks are numbered within the group and may be placed on the hosts in any order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_ALIGNED = 64  # Alignment in elements, so that chunks begin at cache lines.
# maximum number of chunks that are reduced on the host before the first one has returned from the network
AHEAD = 2

Parcel = tuple[int, int]  # ranks of the sender and the receiver of a message


@dataclass(frozen=True)
class Topology:
    """Placement of the group's ranks on hosts, as seen by one rank."""

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts):
            raise ValueError(
                f"{self.hosts} does not assign each of the ranks 0, 1, ... to exactly one host: list each rank once"
            )
        if self.rank not in self._ranks:
            raise ValueError(
                f"rank {self.rank} is not assigned to any of the hosts {self.hosts}: add it to its host"
            )

    @cached_property
    def _ranks(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, index)
            for host, ranks in enumerate(self.hosts)
            for index, rank in enumerate(ranks)
        }

    def of(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's host, and the rank's index on that host."""
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
        """Return the ranks of this host, including this one, in the order of their indices."""
        return self.hosts[self.host]

    @cached_property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks, so that every rank is a carrier."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def inter_node_group(self) -> int:
        """Return the index of this rank's inter-node group."""
        return self.index if self.even else 0

    @property
    def inter_node_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's inter-node group, by host.

        The result is empty if the leader of this host sends for this rank.
        """
        if not self.even and self.index > 0:
            return ()
        return tuple(host[self.inter_node_group] for host in self.hosts)

    def behind(self, carrier: int) -> tuple[int, ...]:
        """Return the ranks for which a carrier sends data between hosts."""
        return (carrier,) if self.even else self.hosts[self.of(carrier)[0]]


# ---- allreduce -------------------------------------------------------------------------------------------------------


class Turn(enum.Enum):
    """Step in the reduction of a chunk. Every chunk passes through the steps in the order listed here."""

    REDUCE = enum.auto()  # Start the collective among the ranks of the host.
    # The chunk is reduced on the host: start the collective between hosts.
    CROSS = enum.auto()
    # The chunk has returned from the network: its carrier sends it to the ranks of the host.
    SPREAD = enum.auto()


def chunks(count: int, element_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Divide ``count`` elements into equal chunks of at most ``chunk_bytes``.

    Return the begin and end of each chunk, in elements.
    """
    assert chunk_bytes % (_ALIGNED * element_bytes) == 0
    if count == 0:
        return []
    number = -(-count * element_bytes // chunk_bytes)
    length = -(-count // number)
    length = -(-length // _ALIGNED) * _ALIGNED
    return [(begin, min(begin + length, count)) for begin in range(0, count, length)]


def schedule(number: int, ahead: int = AHEAD) -> Iterator[tuple[Turn, int]]:
    """Yield the turns of ``number`` chunks, in the order in which they are executed.

    Some chunks are on the network while other chunks are reduced and distributed. The order does not depend on timing,
    so all ranks of a host start the same collectives in the same order.
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
    """Peers of a rank in each step of a broadcast. None means that the rank has no peer in that step."""

    first: int | None  # index of the root if it is on this host: it sends to the carrier
    cross: int | None  # host of the root, which sends to the other hosts
    last: int | None  # index of the carrier on this host, which sends to the other ranks


def route(topology: Topology, root: int) -> Route:
    """Return the steps of a rank in a broadcast from ``root``."""
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
    """One alltoall, within a host or between hosts: the parcels that a rank sends to and receives from each peer."""

    sent: list[list[Parcel]]
    received: list[list[Parcel]]


class Posting(NamedTuple):
    """The exchanges of a hierarchical alltoall: to the carriers, between hosts, and to the receivers.

    Each of the first two is None if this rank does not need it.
    """

    collect: Exchange | None  # exchange within the host before that between hosts, or None
    cross: Exchange | None  # exchange between hosts, or None
    deal: Exchange  # exchange within the host after that between hosts


def posting(topology: Topology) -> Posting:
    """Return a rank's exchanges in an alltoall. Parcels are ordered by host, then by sender and receiver."""
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
