"""The report of a recovery adds up what members report of a sharded state."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic.driver.events import ReportRecovery, ShardsDivided, WorkerResumed
from elastic.driver.membership.worlds.world import World
from elastic.protocol.messages import Commit, RowBytes, ShardsPlaced
from harness.conversation import worker

PARTS = {  # two hosts of two workers, each shard kept on the other host too
    "a:0": ShardsPlaced(4, 0, (2,), restored=Commit(3, 7), rows=RowBytes(100), received=0),
    "a:1": ShardsPlaced(4, 1, (3,), restored=Commit(3, 7), rows=RowBytes(90, host=10)),
    "b:0": ShardsPlaced(4, 2, (0,), restored=Commit(3, 7), rows=RowBytes(0, 0, 100), received=100),
    "b:1": ShardsPlaced(4, 3, (1,), restored=Commit(3, 7), rows=RowBytes(100)),
}


def reported(parts: Mapping[str, ShardsPlaced | None]) -> ReportRecovery:
    world = World(4, [worker(name) for name in parts])
    found = [
        world.resumed(WorkerResumed(worker(name), 4, {}, shards=part), 1.0)
        for name, part in parts.items()
    ]
    assert found[:-1] == [None] * (len(parts) - 1) and found[-1] is not None
    return found[-1]


def test_report_of_a_sharded_world_adds_up_rows_and_counts_hosts_with_copies():
    wanted = ShardsDivided(4, 1, Commit(3, 7), RowBytes(290, 10, 100), 100)
    assert reported(PARTS).shards == wanted


def test_copy_hosts_are_counted_for_the_shard_with_the_fewest_copies():
    part = ShardsPlaced(4, 3, (), restored=Commit(3, 7), rows=RowBytes(100))
    shards = reported(PARTS | {"b:1": part}).shards
    assert shards is not None and shards.copy_hosts == 0


@pytest.mark.parametrize("missing", [["a:0"], list(PARTS)])
def test_report_without_parts_of_all_members_has_no_shards(missing):
    assert reported(PARTS | dict.fromkeys(missing)).shards is None
