"""Selection of the backend of a CPU group: shared memory, Gloo or both. Pure: no clock, network or memory.

All ranks compute the same plan from the same data. Processes share memory if they are on one host, that is, if they run
under the same boot of one kernel, in one PID namespace (so that processes can find each other by PID) and in one
network namespace (so that a network failure affects all of them).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MAX_LOCAL_RANKS = 64  # maximum number of ranks per host in a native group


class Host(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a host: the boot ID of the kernel, and the PID and network namespaces.

    Namespaces are identified by their inodes.
    """

    boot: str
    processes: int
    network: int


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one process, which distinguishes it from other processes with the same PID."""

    host: Host
    pid: int
    started: int  # start time of the process, in clock ticks since the boot
    user: int


class Shareable(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a process offers: its descriptor in that process, and properties to verify."""

    fd: int
    inode: int
    bytes: int


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """Data that one rank publishes before the backend is selected.

    ``control`` is the control block of its host's group, used if this rank is the first on the host. ``staging`` is the
    offset of the rank's staging buffer in its arena. ``cores`` is a bit mask of the cores on which the rank may run;
    the lowest bit is core 0.
    """

    native: bool  # whether native groups are enabled
    identity: Identity | None = None
    arena: Shareable | None = None
    control: Shareable | None = None
    staging: int = 0
    cores: bytes = b""
    why_not: str = ""  # why shared memory is unavailable, and the remedy


class Backend(enum.Enum):
    SHARED = enum.auto()  # all ranks are on one host and share memory
    HIERARCHY = enum.auto()  # several hosts, with several ranks on some
    GLOO = enum.auto()


@dataclass(frozen=True)
class BackendSelection:
    """The selected backend, and the hosts of the ranks.

    Args:
        backend: the backend.
        hosts: the ranks of each host, ascending. Hosts are in the order of their first ranks.
        why: reason why ranks on one machine do not share memory. Empty if they do, or if no host has several ranks.
    """

    backend: Backend
    hosts: tuple[tuple[int, ...], ...]
    why: str = ""

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this rank's host, including this rank."""
        return next(ranks for ranks in self.hosts if rank in ranks)


def plan(rows: Sequence[RankInfo]) -> BackendSelection:
    """Select the backend of a group in which rank r has published ``rows[r]``."""
    hosts = _hosts(rows)
    if all(len(ranks) == 1 for ranks in hosts):
        return BackendSelection(Backend.GLOO, hosts, _unknown(rows) or _apart(rows))
    if not any(row.native for row in rows):
        return BackendSelection(Backend.GLOO, hosts)
    why = _objection(rows, hosts)
    if why:
        return BackendSelection(Backend.GLOO, hosts, why)
    return BackendSelection(
        Backend.SHARED if len(hosts) == 1 else Backend.HIERARCHY, hosts, _apart(rows)
    )


def cores(rows: Sequence[RankInfo], ranks: Sequence[int]) -> int:
    """Return the number of distinct cores on which these ranks may run."""
    together = 0
    for rank in ranks:
        together |= int.from_bytes(rows[rank].cores, "little")
    return together.bit_count()


def _hosts(rows: Sequence[RankInfo]) -> tuple[tuple[int, ...], ...]:
    found: dict[Host | int, list[int]] = {}
    for rank, row in enumerate(rows):
        found.setdefault(rank if row.identity is None else row.identity.host, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _unknown(rows: Sequence[RankInfo]) -> str:
    for rank, row in enumerate(rows):
        if row.native and row.identity is None:
            return f"rank {rank}: {row.why_not}"
    return ""


def _apart(rows: Sequence[RankInfo]) -> str:
    first: dict[str, tuple[int, Host]] = {}
    for rank, row in enumerate(rows):
        if row.native and row.identity is not None:
            host = row.identity.host
            other, there = first.setdefault(host.boot, (rank, host))
            if host != there:
                kind = "PID" if host.processes != there.processes else "network"
                return (
                    f"ranks {other} and {rank} run on one machine in different {kind} namespaces, as in two"
                    " containers: run them in one"
                )
    return ""


def _objection(rows: Sequence[RankInfo], hosts: Sequence[Sequence[int]]) -> str:
    for rank, row in enumerate(rows):
        if not row.native:
            return f"rank {rank} has ELASTIC_NATIVE=0: set the same on all ranks"
    for ranks in hosts:
        if len(ranks) > 1:
            for rank in ranks:
                why = _unable(rows, rank, ranks[0])
                if why:
                    return why
            if len(ranks) > MAX_LOCAL_RANKS:
                return f"{len(ranks)} ranks run on one host, more than the {MAX_LOCAL_RANKS} that can share memory"
    return ""


def _unable(rows: Sequence[RankInfo], rank: int, first: int) -> str:
    row, other = rows[rank], rows[first]
    if row.arena is None or row.control is None:
        return f"rank {rank}: {row.why_not}"
    if row.identity is not None and other.identity is not None:
        mine, theirs = row.identity.user, other.identity.user
        if mine != theirs:
            users = f"rank {rank} runs as user {mine}, rank {first} as user {theirs}"
            return f"{users}: run the ranks of a host as one user"
    return ""
