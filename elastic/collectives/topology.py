"""Decides how the ranks of a group on the CPU reach each other: shared memory, both, or Gloo. Pure: no clock, no
network, no memory. Every rank has the same rows, and comes to the same plan.

A host is what processes can share memory in: one boot of one kernel, one namespace of process ids, so that a process
is found by its id, and one network, so that what is cut off by its network is cut off altogether.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MAX_LOCAL_RANKS = 64  # ranks of one host that the native group takes


class Host(msgspec.Struct, frozen=True, array_like=True):
    """Where processes can find each other; the numbers are inodes of namespaces."""

    boot: str
    processes: int
    network: int


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """One process, told apart from any that had or will have its id."""

    host: Host
    pid: int
    started: int  # clock ticks after the boot
    user: int


class Shareable(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a process offers: its descriptor there, and what it must be found to be."""

    fd: int
    inode: int
    bytes: int


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells the others before they decide.

    ``control`` is a control block for the group of its host, in case this rank comes first there; ``staging`` where the
    rank's staging lies in its arena. ``cores`` is a mask of the cores it may run on, lowest first.
    """

    native: bool  # it was not turned off
    identity: Identity | None = None
    arena: Shareable | None = None
    control: Shareable | None = None
    staging: int = 0
    cores: bytes = b""
    why_not: str = ""  # why something of that is missing, and what to do


class Backend(enum.Enum):
    SHARED = enum.auto()  # all ranks lie on one host
    HIERARCHY = enum.auto()  # several hosts, with several ranks on some
    GLOO = enum.auto()


@dataclass(frozen=True)
class Plan:
    """``hosts`` are the ranks of each, ascending; the hosts stand in the order of their first ranks. ``why`` is why
    memory is not shared although ranks run on one machine; empty where nothing is amiss.
    """

    backend: Backend
    hosts: tuple[tuple[int, ...], ...]
    why: str = ""

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's host, itself among them."""
        return next(ranks for ranks in self.hosts if rank in ranks)


def plan(rows: Sequence[RankInfo]) -> Plan:
    """For a group whose rank r gave ``rows[r]``."""
    hosts = _hosts(rows)
    if all(len(ranks) == 1 for ranks in hosts):
        return Plan(Backend.GLOO, hosts, _unknown(rows) or _apart(rows))
    if not any(row.native for row in rows):
        return Plan(Backend.GLOO, hosts)
    why = _objection(rows, hosts)
    if why:
        return Plan(Backend.GLOO, hosts, why)
    return Plan(Backend.SHARED if len(hosts) == 1 else Backend.HIERARCHY, hosts, _apart(rows))


def cores(rows: Sequence[RankInfo], ranks: Sequence[int]) -> int:
    """How many cores these ranks have between them."""
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
    """Ranks that can't say where they are may share a host; that is worth a line where it was meant to be used."""
    for rank, row in enumerate(rows):
        if row.native and row.identity is None:
            return f"rank {rank}: {row.why_not}"
    return ""


def _apart(rows: Sequence[RankInfo]) -> str:
    """Ranks that run on one machine and yet on different hosts, as containers do. Whoever wants that turns it off."""
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
    """The first of the lowest rank. One that is alone on its host shares nothing, and need not be able to."""
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
            who = f"rank {rank} runs as user {mine}, rank {first} as user {theirs}"
            return f"{who}: run the ranks of a host as one user"
    return ""
