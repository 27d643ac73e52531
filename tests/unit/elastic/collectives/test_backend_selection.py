"""Connections of the ranks of a group on the CPU, from the ranks' own data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from elastic.collectives import backend_selection
from elastic.collectives.backend_selection import (
    Backend,
    BackendSelection,
    Host,
    Identity,
    RankInfo,
    Shareable,
    plan,
)
from harness.golden import recorded

NO_ROOM = "no 64 GiB of memory to share can be mapped: raise it"


def rank_on(
    boot: str, pid: int = 1, *, processes: int = 7, network: int = 8, **other: Any
) -> RankInfo:
    """A rank that can share memory."""
    host = Host(boot, processes, network)
    row = RankInfo(
        native=True,
        identity=Identity(host, pid, started=100, user=1000),
        arena=Shareable(fd=3, inode=pid, bytes=1 << 30),
        control=Shareable(fd=4, inode=-pid, bytes=1 << 16),
    )
    return msgspec.structs.replace(row, **other)


def unable(boot: str, why: str = NO_ROOM) -> RankInfo:
    return rank_on(boot, arena=None, why_not=why)


def off(boot: str) -> RankInfo:
    return rank_on(boot, native=False, arena=None, control=None)


def as_user(row: RankInfo, user: int) -> RankInfo:
    assert row.identity is not None
    return msgspec.structs.replace(row, identity=msgspec.structs.replace(row.identity, user=user))


NOWHERE = RankInfo(native=True, why_not="/proc does not tell who this process is; mount it")


def test_ranks_of_one_host_share_memory():
    assert plan([rank_on("a", 1), rank_on("a", 2)]) == BackendSelection(Backend.SHARED, ((0, 1),))


def test_single_ranks_per_host_use_gloo_without_a_log_line():
    assert plan([rank_on("a"), rank_on("b")]) == BackendSelection(Backend.GLOO, ((0,), (1,)))
    assert plan([unable("a"), off("b")]) == BackendSelection(Backend.GLOO, ((0,), (1,)))


def test_several_hosts_with_several_ranks_are_a_hierarchy():
    decided = plan([rank_on("a"), rank_on("b"), rank_on("a"), rank_on("b")])
    assert decided == BackendSelection(Backend.HIERARCHY, ((0, 2), (1, 3)))
    assert decided.local_ranks(3) == (1, 3)


def test_hosts_may_have_unequally_many_ranks():
    decided = plan([rank_on("b"), rank_on("a"), rank_on("a")])
    assert decided == BackendSelection(Backend.HIERARCHY, ((0,), (1, 2)))


def test_ranks_in_different_pid_namespaces_count_as_different_hosts():
    containers = [rank_on("b"), rank_on("a", processes=1), rank_on("a", processes=2)]
    why = "ranks 1 and 2 run on one machine in different PID namespaces, as in two containers: run them in one"
    assert plan(containers) == BackendSelection(Backend.GLOO, ((0,), (1,), (2,)), why)


def test_rank_in_another_network_namespace_counts_as_another_host():
    decided = plan([rank_on("a", network=1), rank_on("a", network=2)])
    assert decided.backend is Backend.GLOO
    recorded("messages", decided.why)


def test_containers_with_several_ranks_are_a_hierarchy_with_a_reason():
    decided = plan([rank_on("a", processes=1 + rank // 2) for rank in range(4)])
    assert (decided.backend, decided.hosts) == (Backend.HIERARCHY, ((0, 1), (2, 3)))
    recorded("messages", decided.why)


def test_containers_use_gloo_silently_when_shared_memory_is_turned_off():
    rows = [
        msgspec.structs.replace(off("a"), identity=rank_on("a", processes=n).identity)
        for n in (1, 2)
    ]
    assert plan(rows) == BackendSelection(Backend.GLOO, ((0,), (1,)))


def test_rank_without_support_disables_shared_memory_for_all_with_a_reason():
    rows = [rank_on("a"), rank_on("a"), unable("a"), rank_on("b")]
    assert plan(rows) == BackendSelection(Backend.GLOO, ((0, 1, 2), (3,)), f"rank 2: {NO_ROOM}")


def test_single_rank_of_a_host_needs_no_shared_memory_support():
    rows = [rank_on("a"), rank_on("a"), unable("b")]
    assert plan(rows) == BackendSelection(Backend.HIERARCHY, ((0, 1), (2,)))


def test_shared_memory_turned_off_on_all_ranks_is_not_logged():
    assert plan([off("a"), off("a")]) == BackendSelection(Backend.GLOO, ((0, 1),))


def test_shared_memory_turned_off_on_one_rank_is_off_on_all():
    why = "rank 2 has ELASTIC_NATIVE=0: set the same on all ranks"
    assert plan([rank_on("a"), rank_on("a"), off("b")]) == BackendSelection(
        Backend.GLOO, ((0, 1), (2,)), why
    )


def test_ranks_of_a_host_under_different_users_do_not_share_memory():
    rows = [rank_on("a"), as_user(rank_on("a"), 1001), as_user(rank_on("b"), 1002)]
    why = "rank 1 runs as user 1001, rank 0 as user 1000: run the ranks of a host as one user"
    assert plan(rows) == BackendSelection(Backend.GLOO, ((0, 1), (2,)), why)


def test_hosts_may_run_as_different_users():
    rows = [rank_on("a"), rank_on("a"), *[as_user(rank_on("b"), 1001)] * 2]
    assert plan(rows).backend is Backend.HIERARCHY


def test_rank_without_a_known_host_counts_as_a_separate_host_and_is_logged():
    said = f"rank 1: {NOWHERE.why_not}"
    assert plan([NOWHERE, NOWHERE]) == BackendSelection(
        Backend.GLOO, ((0,), (1,)), said.replace("1", "0")
    )
    assert plan([rank_on("a"), NOWHERE]).why == said
    assert plan([rank_on("a"), rank_on("a"), NOWHERE]).backend is Backend.HIERARCHY


def test_more_than_64_ranks_of_a_host_do_not_share_memory():
    assert plan([rank_on("a", pid) for pid in range(64)]).backend is Backend.SHARED
    decided = plan([rank_on("a", pid) for pid in range(65)])
    assert decided.backend is Backend.GLOO
    recorded("messages", decided.why)


def test_every_rank_computes_the_same_plan_from_the_received_data():
    choice = random.Random(7)
    kinds: list[Callable[[str], RankInfo]] = [rank_on, unable, off]
    rows = [choice.choice(kinds)(choice.choice("abc")) for _ in range(50)]
    sent = msgspec.msgpack.encode(rows)
    assert plan(msgspec.msgpack.decode(sent, type=list[RankInfo])) == plan(rows)


def test_cores_are_counted_once():
    rows = [rank_on("a", cores=bytes([mask])) for mask in (0b0011, 0b0110, 0b1000)]
    assert backend_selection.cores(rows, (0, 1)) == 3
    assert backend_selection.cores(rows, (0, 2)) == 3
    assert backend_selection.cores(rows, (0, 1, 2)) == 4
    assert backend_selection.cores([rank_on("a", cores=bytes([0, 1]))], (0,)) == 1
