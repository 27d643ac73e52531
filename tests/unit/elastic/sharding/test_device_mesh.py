"""The shape of a mesh of replicas by shards, its ranks, and what commits and changes of the world send there."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import Invalid
from elastic.sharding.copy_placement import place_copies
from elastic.sharding.device_mesh import MeshShape, columns, mesh_shape, sender
from elastic.sharding.double_buffer import BufferRecord, BufferState
from elastic.sharding.resharding import order_of_replicas, plan_moves, travelling
from elastic.sharding.row_layout import ShardedTensor, ShardLayout, owners, rows_of
from elastic.sharding.shard_inventory import (
    CommitId,
    HeldShard,
    Inventory,
    WholeCommit,
    newest_whole,
)

TENSORS = (ShardedTensor("weight", 120, 8), ShardedTensor("bias", 12, 4))
PIECE = 1 << 20


# ---- the shape -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "least", "replicas", "shards"),
    [
        (4, 2, 2, 2),
        (3, 2, 1, 3),
        (5, 2, 1, 5),
        (6, 2, 3, 2),
        (6, 4, 1, 6),
        (8, 3, 2, 4),
        (9, 2, 3, 3),
        (4, 1, 4, 1),
        (1, 1, 1, 1),
        (2, 2, 1, 2),
    ],
)
def test_mesh_has_as_many_replicas_as_memory_and_ranks_allow(size, least, replicas, shards):
    assert mesh_shape(size, least) == MeshShape(replicas, shards)


@given(st.integers(1, 200), st.integers(1, 200))
def test_mesh_uses_all_ranks_with_as_many_replicas_as_possible(size: int, least: int):
    if size < least:
        with pytest.raises(Invalid):
            mesh_shape(size, least)
        return
    found = mesh_shape(size, least)
    assert found.replicas * found.shards == size
    assert found.shards >= least
    assert not any(size % more == 0 for more in range(found.replicas + 1, size // least + 1))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_shard_has_one_sender_among_its_ranks(replicas: int, shards: int, data):
    order = data.draw(st.permutations(range(replicas * shards)))
    shard_of = owners(order, shards)
    for shard, column in enumerate(columns(order, shards)):
        assert {rank for rank, each in shard_of.items() if each == shard} == {*column}
        assert sender(column, shard) in column
    rows = {order.index(sender(c, n)) // shards for n, c in enumerate(columns(order, shards))}
    assert len(rows) == min(replicas, shards)


# ---- copies --------------------------------------------------------------------------------------

meshes = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda drawn: st.tuples(
        st.just(drawn[1]),
        st.permutations(range(drawn[0] * drawn[1])),
        st.lists(
            st.sampled_from("abc"), min_size=drawn[0] * drawn[1], max_size=drawn[0] * drawn[1]
        ),
    )
)


@given(meshes, st.integers(0, 3))
def test_replicas_count_as_copies_and_only_missing_copies_are_placed(mesh, copies: int):
    shards, order, named = mesh
    size = len(order)
    placed = place_copies(order, named, copies, shards=shards)
    for column, ranks in zip(columns(order, shards), placed, strict=True):
        holding = {*column, *ranks}
        assert len(holding) == len(column) + len(ranks)
        assert len(holding) >= 1 + min(copies, size - 1)
        spread = len({named[rank] for rank in holding})
        assert spread >= min(1 + copies, len({*named}))
        alone = len({named[rank] for rank in column})
        if len(column) > copies and alone >= min(1 + copies, len({*named})):
            assert not ranks, "replicas on enough hosts need no copy"


def test_shards_with_a_replica_on_another_host_need_no_copy():
    assert place_copies(range(4), ["a", "a", "b", "b"], 1, shards=2) == ((), ())
    assert all(place_copies(range(4), ["a", "b", "a", "b"], 1, shards=2))


# ---- the commit, and what moves ------------------------------------------------------------------


def held_in(size: int, shards: int, commit: CommitId) -> list[Inventory]:
    """Each rank has its own shard, of a mesh with ranks in order."""
    where = tuple(("h",) for _ in range(shards))
    return [(HeldShard(commit, shards, rank % shards, True, where),) for rank in range(size)]


def left(size: int, shards: int, lost: set[int], joined: int = 0) -> WholeCommit | None:
    found = held_in(size, shards, CommitId(2, 5))
    return newest_whole([held for r, held in enumerate(found) if r not in lost] + [()] * joined)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_commit_is_complete_while_one_replica_of_each_shard_remains(replicas, shards, data):
    size = replicas * shards
    lost = data.draw(st.sets(st.integers(0, size - 1)))
    whole = left(size, shards, lost)
    covered = {rank % shards for rank in range(size) if rank not in lost} == {*range(shards)}
    assert (whole is not None) == covered
    if whole is not None:
        assert whole.shards == shards
        assert sum(map(len, whole.holders)) == size - len(lost)


def test_initial_state_is_copied_from_one_replica():
    whole = newest_whole(held_in(4, 2, CommitId(0, 0)))
    assert whole is not None
    assert whole.holders == ((0,), (1,))
    moves = plan_moves(whole, TENSORS, range(4), ["h"] * 4, PIECE, 2)
    assert {(each.source, each.target) for each in moves if each.source != each.target} == {
        (0, 2),
        (1, 3),
    }


worlds = st.tuples(st.integers(2, 9), st.integers(1, 3)).flatmap(
    lambda drawn: st.tuples(
        st.just(drawn[0]),
        st.just(drawn[1]),
        st.sets(st.integers(0, drawn[0] - 1), max_size=2),
        st.integers(0, 3),
    )
)


@given(worlds, st.integers(0, 2), st.data())
def test_every_rank_gets_the_rows_of_its_shard_once(world, copies: int, data):
    size, least, lost, joined = world
    now = size - len(lost) + joined
    if size < least or now < least:
        return
    old, new = mesh_shape(size, least).shards, mesh_shape(now, least).shards
    whole = left(size, old, lost, joined)
    if whole is None:
        return
    named = data.draw(st.lists(st.sampled_from("ab"), min_size=now, max_size=now))
    order = order_of_replicas(whole, TENSORS, named, new, copies)
    assert sorted(order) == list(range(now))
    moves = plan_moves(whole, TENSORS, order, named, PIECE, new)
    for rank, shard in owners(order, new).items():
        for number, tensor in enumerate(TENSORS):
            got = [m for m in moves if m.target == rank and m.tensor == number]
            rows = sorted(row for m in got for row in range(*m.rows))
            assert rows == list(range(*rows_of(tensor.rows, shard, new)))
            assert all(each.source in whole.holders[each.shard] for each in got)

    def sent(order: list[int]) -> tuple[int, int]:
        """Hosts that lack a shard, of which each commit sends a copy, and bytes that move now."""
        plan = plan_moves(whole, TENSORS, order, named, PIECE, new)
        spread = sum(
            min(1 + copies, len({named[rank] for rank in column})) for column in columns(order, new)
        )
        return -spread, travelling(plan, ShardLayout(TENSORS, old))

    assert sent(order) <= sent(list(range(now)))


@pytest.mark.parametrize(
    ("size", "shards", "lost", "joined", "now"),
    [
        (4, 2, {1}, 0, 3),
        (4, 2, {0}, 0, 3),
        (4, 2, {1}, 1, 2),
        (4, 2, {3}, 1, 2),
        (3, 3, set(), 1, 2),
        (6, 2, {0, 2}, 0, 2),
        (6, 3, {0}, 0, 5),
    ],
)
def test_chosen_order_of_ranks_moves_the_fewest_bytes(size, shards, lost, joined, now):
    """``now``: shards."""
    whole = left(size, shards, lost, joined)
    assert whole is not None
    hosts = [f"h{rank}" for rank in range(size - len(lost) + joined)]
    layout = ShardLayout(TENSORS, shards)

    def moved(order: list[int]) -> int:
        return travelling(plan_moves(whole, TENSORS, order, hosts, PIECE, now), layout)

    best = min(moved(list(order)) for order in itertools.permutations(range(len(hosts))))
    assert moved(order_of_replicas(whole, TENSORS, hosts, now, 1)) == best


def test_replicas_are_placed_on_different_hosts_despite_more_bytes_moved():
    """Three ranks of a shard each become two replicas of two shards."""
    whole = left(3, 3, set(), joined=1)
    assert whole is not None
    hosts = ["a", "a", "b", "b"]
    order = order_of_replicas(whole, TENSORS, hosts, 2, 1)
    assert all({hosts[rank] for rank in column} == {"a", "b"} for column in columns(order, 2))
    assert place_copies(order, hosts, 1, shards=2) == ((), ())


def test_replacement_receives_the_lost_shard_and_no_other_rank_receives_rows():
    whole = left(4, 2, {1}, joined=1)
    assert whole is not None
    order = order_of_replicas(whole, TENSORS, ["a", "b", "c", "d"], 2, 1)
    moves = plan_moves(whole, TENSORS, order, ["a", "b", "c", "d"], PIECE, 2)
    assert {each.target for each in moves if each.source != each.target} == {3}
    assert owners(order, 2)[3] == 1


def test_unsealed_commit_is_used_only_when_no_sealed_one_is_complete():
    """Replicas hold all of it before its copies are complete: another loss would leave nothing."""
    sealed, begun = CommitId(2, 5), CommitId(2, 6)
    of_both = [
        (*held, *(each._replace(mirrored=False) for each in more))
        for held, more in zip(held_in(4, 2, sealed), held_in(4, 2, begun), strict=True)
    ]
    for lost in range(4):
        found = newest_whole([held for rank, held in enumerate(of_both) if rank != lost])
        assert found is not None
        assert found.commit == sealed
    only_begun = [held[1:] for held in of_both]
    assert (whole := newest_whole(only_begun)) is not None
    assert whole.commit == begun, "there is no other"


def test_buffer_reports_whether_its_copies_are_complete():
    record = BufferRecord(CommitId(2, 5), 2, 1, (0,), ())
    for state, held in (
        (BufferState.WRITING, []),
        (BufferState.OWN, [False]),
        (BufferState.MIRRORED, [True, True]),
    ):
        record.state = state
        assert [each.mirrored for each in record.held()] == held
