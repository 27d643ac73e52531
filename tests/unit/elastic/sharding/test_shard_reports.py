"""Reports of a rank to the driver: what it holds of each commit, and where its rows in a new world came from."""

from __future__ import annotations

from elastic.protocol.messages import Commit, HeldCommitShards, RowBytes, ShardsHeld, ShardsPlaced
from elastic.sharding import shard_reports
from elastic.sharding.double_buffer import BufferRecord, DoubleBuffer
from elastic.sharding.resharding import plan_moves, travelling
from elastic.sharding.row_layout import ShardedTensor, ShardLayout
from elastic.sharding.shard_inventory import CommitId, HeldShard, WholeCommit

TENSORS = (ShardedTensor("weight", 12, 8), ShardedTensor("bias", 3, 4))
PIECE = 16


def test_report_of_held_shards_has_one_entry_per_commit():
    cycle = DoubleBuffer()
    assert cycle.newest_sealed is None
    cycle.begin(BufferRecord(CommitId(2, 4), 3, 1, (0,), ()))
    cycle.copied()
    cycle.mirrored()
    cycle.sealed()
    cycle.begin(BufferRecord(CommitId(2, 5), 3, 1, (0,), ()))
    cycle.copied()
    mapped = HeldShard(CommitId(2, 4), 3, 2, False)  # of another process of the host
    held = shard_reports.as_held((*cycle.inventory(), mapped), 1, cycle.newest_sealed)
    assert held == ShardsHeld(
        1,
        Commit(2, 4),
        (
            HeldCommitShards(Commit(2, 4), 3, 1, (0, 2), True),
            HeldCommitShards(Commit(2, 5), 3, 1, (), False),
        ),
    )


def test_commit_adopted_by_another_world_is_not_reported_as_sealed():
    cycle = DoubleBuffer()
    for number, seals in ((4, True), (5, False)):
        cycle.begin(BufferRecord(CommitId(2, number), 3, 1, (0,), ()))
        cycle.copied()
        if seals:
            cycle.mirrored()
            cycle.sealed()
    assert cycle.adopt(CommitId(2, 5)) is not None
    assert cycle.newest_sealed == CommitId(2, 4)
    cycle.forget()
    assert cycle.newest_sealed is None


def test_initial_state_is_not_reported_as_sealed():
    cycle = DoubleBuffer()
    cycle.begin(BufferRecord(CommitId(0, 0), 3, 1, (), ()))
    cycle.copied()
    cycle.mirrored()
    cycle.sealed()
    assert cycle.newest_sealed is None


def test_rows_are_counted_by_their_source():
    """Three ranks; shard 1 is lost: rank 0 has mapped it, and shard 2 is on another host."""
    hosts = ("a", "a", "b")
    whole = WholeCommit(CommitId(2, 4), 3, ((0,), (0,), (2,)), (0, None, 2))
    layout = ShardLayout(TENSORS, 3)
    moves = plan_moves(whole, TENSORS, [0, 1, 2], hosts, PIECE)
    parts = [
        shard_reports.as_placed(
            ShardsPlaced(3, rank), whole, moves, layout, rank, hosts, {0} if rank == 0 else {2}
        )
        for rank in range(3)
    ]
    one = 4 * 8 + 4  # bytes of a shard
    assert [each.rows for each in parts] == [RowBytes(one), RowBytes(host=one), RowBytes(one)]
    assert [each.lost_rows for each in parts] == [RowBytes(), RowBytes(host=one), RowBytes()]
    assert [each.received for each in parts] == [0, one, 0]
    assert sum(each.received for each in parts) == travelling(moves, layout)
    assert {(each.lost, each.restored) for each in parts} == {((1,), Commit(2, 4))}


def test_rows_from_another_host_are_counted_as_network_bytes():
    hosts = ("a", "b")
    whole = WholeCommit(CommitId(2, 4), 2, ((0,), (0,)), (0, None))
    layout = ShardLayout(TENSORS, 2)
    moves = plan_moves(whole, TENSORS, [0, 1], hosts, PIECE)
    first, second = (
        shard_reports.as_placed(ShardsPlaced(2, rank), whole, moves, layout, rank, hosts, held)
        for rank, held in enumerate(({0}, ()))
    )
    assert first.rows.network == first.rows.host == 0
    assert second.rows == second.lost_rows == RowBytes(network=second.received)
