"""Rows of shards, placement of copies, the choice of a commit and the moves to it, over drawn worlds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.sharding.copy_placement import copied_to, lasting, place_copies
from elastic.sharding.resharding import move_bytes, order_of_shards, plan_moves, rounds, travelling
from elastic.sharding.row_layout import (
    ALIGNMENT,
    ShardedTensor,
    ShardLayout,
    overlap,
    pieces,
    rows_of,
    shards_with,
)
from elastic.sharding.shard_inventory import (
    CommitId,
    HeldShard,
    Inventory,
    WholeCommit,
    lost_shards,
    newest_whole,
)

lengths, sizes = st.integers(0, 40), st.integers(1, 9)
tensors = st.lists(st.tuples(lengths, st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda drawn: tuple(ShardedTensor(f"t{n}", *each) for n, each in enumerate(drawn))
)


@given(lengths, sizes)
def test_shards_have_every_row_once_in_the_order_of_torch_chunk(rows: int, shards: int):
    torch = pytest.importorskip("torch")
    found = [rows_of(rows, shard, shards) for shard in range(shards)]
    assert [row for each in found for row in range(*each)] == list(range(rows))
    chunks = torch.arange(rows, device="cpu").chunk(shards) if rows else []
    assert [list(range(*each)) for each in found if len(each)] == [c.tolist() for c in chunks]


@given(lengths, sizes, sizes, st.data())
def test_shards_with_a_row_are_the_overlapping_ones(rows: int, old: int, new: int, data):
    wanted = rows_of(rows, data.draw(st.integers(0, new - 1)), new)
    found = [shard for shard in range(old) if len(overlap(rows_of(rows, shard, old), wanted))]
    assert found == list(shards_with(wanted, rows, old))


@given(tensors, sizes)
def test_the_bytes_of_tensors_begin_aligned_and_do_not_overlap(drawn, shards: int):
    layout = ShardLayout(drawn, shards)
    for shard in range(shards):
        offsets = layout.offsets(shard)
        assert all(offset % ALIGNMENT == 0 for offset in offsets)
        for tensor, (begin, end) in zip(drawn, itertools.pairwise(offsets), strict=True):
            assert end - begin >= len(layout.rows(tensor, shard)) * tensor.row_bytes
    assert layout.nbytes(0) == max(map(layout.nbytes, range(shards)))


@given(lengths, st.integers(1, 9), st.integers(1, 50))
def test_pieces_cover_all_rows_within_the_limit(rows: int, row_bytes: int, limit: int):
    whole = rows_of(rows, 0, 1)
    found = list(pieces(whole, row_bytes, limit))
    assert [row for each in found for row in range(*each)] == list(range(rows))
    assert all(len(each) == 1 or len(each) * row_bytes <= limit for each in found)


# ---- placement -----------------------------------------------------------------------------------

hosts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(hosts, st.integers(0, 3))
def test_copies_are_on_different_ranks_and_on_different_hosts_where_possible(named, copies: int):
    size = len(named)
    placed = place_copies(range(size), named, copies)
    for owner, ranks in enumerate(placed):
        assert len({owner, *ranks}) == 1 + min(copies, size - 1)
        spread = {named[rank] for rank in (owner, *ranks)}
        assert len(spread) == min(1 + copies, len(set(named)), size)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_hosts_of_one_size_keep_the_same_number_of_copies_on_each_rank(many, each, copies):
    named = [f"h{number // each}" for number in range(many * each)]
    placed = place_copies(range(len(named)), named, copies)
    kept = {len(copied_to(placed, rank)) for rank in range(len(named))}
    assert len(kept) == 1


@given(st.integers(2, 7), st.integers(1, 2), st.permutations(range(7)))
def test_any_ranks_up_to_the_number_of_copies_can_be_lost(size, copies, drawn):
    order = [rank for rank in drawn if rank < size]
    placed = place_copies(order, ["one"] * size, copies)
    for lost in itertools.combinations(range(size), min(copies, size - 1)):
        for shard, ranks in enumerate(placed):
            assert {order[shard], *ranks} - {*lost}


@given(hosts, st.integers(0, 3))
def test_copies_of_memory_that_outlives_its_rank_are_placed_only_on_other_hosts(named, copies: int):
    """Each host is one machine, whose ranks map each other's memory."""
    reached = [{n for n, each in enumerate(named) if each == host} for host in named]
    outlives = lasting(named, reached)
    assert outlives == [named.count(host) > 1 for host in named]
    placed = place_copies(range(len(named)), named, copies, outlives)
    for owner, ranks in enumerate(placed):
        if outlives[owner]:
            assert len(ranks) == min(copies, len(set(named)) - 1)
            assert len({named[rank] for rank in (owner, *ranks)}) == len(ranks) + 1


def test_memory_that_a_rank_of_the_machine_cannot_map_does_not_outlive_its_rank():
    assert lasting(["m", "m", "m"], [{1, 2}, {0}, {0, 1}]) == [True, True, False]
    assert lasting([None, "m"], [set(), set()]) == [False, False]


# ---- which commit, and what moves ----------------------------------------------------------------


def held_in(size: int, copies: int, commit: CommitId) -> list[Inventory]:
    placed = place_copies(range(size), ["one"] * size, copies)
    where = tuple(tuple(f"h{rank}" for rank in (s, *placed[s])) for s in range(size))
    return [
        tuple(
            HeldShard(commit, size, shard, shard == rank, where)
            for shard in (rank, *copied_to(placed, rank))
        )
        for rank in range(size)
    ]


@given(st.integers(2, 6), st.integers(0, 2), st.data())
def test_newest_complete_commit_is_chosen(size: int, copies: int, data):
    old, new = CommitId(3, 8), CommitId(4, 0)
    of_old, of_new = held_in(size, copies, old), held_in(size, copies, new)
    # Each rank was lost, or was cut before the newer commit was whole in it.
    fate = data.draw(
        st.lists(st.sampled_from(["lost", "old", "both"]), min_size=size, max_size=size)
    )
    left = [
        of_old[rank] + (of_new[rank] if how == "both" else ())
        for rank, how in enumerate(fate)
        if how != "lost"
    ]
    found = newest_whole(left)
    for commit in (new, old):
        shards = {each.shard for inventory in left for each in inventory if each.commit == commit}
        if len(shards) == size:
            assert found is not None
            assert found.commit == commit
            break
    else:
        assert found is None
        for each in lost_shards(left):
            assert each.hosts
            assert each.shards == size
            assert all(each.shard != h.shard for i in left for h in i if h.commit == each.commit)
        assert bool(lost_shards(left)) == bool(left)


def survivors(size: int, copies: int, lost: set[int], joined: int) -> WholeCommit | None:
    found = held_in(size, copies, CommitId(1, 1))
    return newest_whole([held for r, held in enumerate(found) if r not in lost] + [()] * joined)


worlds = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.just(size), st.integers(0, 2), st.sets(st.integers(0, size - 1)), st.integers(0, 3)
    )
)


@given(worlds, tensors, st.integers(1, 60), st.data())
def test_every_row_of_every_new_shard_arrives_once_from_a_rank_that_has_the_row(
    world, drawn, limit: int, data
):
    size, copies, lost, joined = world
    whole = survivors(size, copies, lost, joined)
    if whole is None:
        return
    now = size - len(lost) + joined
    order = order_of_shards(whole, drawn, now)
    assert sorted(order) == list(range(now))
    named = data.draw(st.lists(st.sampled_from("ab"), min_size=now, max_size=now))
    moves = plan_moves(whole, drawn, order, named, limit)
    for number, tensor in enumerate(drawn):
        for shard, rank in enumerate(order):
            got = [m for m in moves if m.target == rank and m.tensor == number]
            rows = sorted(row for m in got for row in range(*m.rows))
            assert rows == list(range(*rows_of(tensor.rows, shard, now)))
            for move in got:
                old = rows_of(tensor.rows, move.shard, whole.shards)
                assert old.begin <= move.rows.begin <= move.rows.end <= old.end
                assert move.source in whole.holders[move.shard]
                assert (move.source == rank) == (rank in whole.holders[move.shard])
    layout = ShardLayout(drawn, whole.shards)
    apart = list(rounds(moves, layout, limit))
    assert [m for each in apart for m in each] == [m for m in moves if m.source != m.target]
    assert all(len(r) == 1 or sum(move_bytes(m, layout) for m in r) <= limit for r in apart)


@given(st.integers(2, 6), st.integers(1, 2), st.data(), tensors)
def test_replacement_receives_the_lost_shard_and_no_other_bytes_are_sent(size, copies, data, drawn):
    lost = data.draw(st.integers(0, size - 1))
    whole = survivors(size, copies, {lost}, 1)
    assert whole is not None
    order = order_of_shards(whole, drawn, size)
    moves = plan_moves(whole, drawn, order, ["one"] * size, 1 << 20)
    layout = ShardLayout(drawn, size)
    shard = sum(len(layout.rows(t, lost)) * t.row_bytes for t in drawn)
    assert order[lost] == size - 1, "whoever came last"
    assert travelling(moves, layout) == shard
