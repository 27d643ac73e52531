"""An error that all ranks find is raised by a rank only once the others have what they found it in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.collectives import raise_together
from elastic.errors import StateMismatch
from elastic.sharding.shard_inventory import CommitId
from elastic.state.fully_sharded.shard_buffers import ShardBuffers
from elastic.state.fully_sharded.sharded_commits import ShardedCommits, ShardedWorld
from elastic.state.fully_sharded.sharded_handlers import LiveShard, RowSpec
from harness.fakes.collectives import FakeCollectives, world


def compare_commits(group: FakeCollectives) -> None:
    """Of ranks that have committed differently often."""
    commits, bank = ShardedCommits(lambda: [], 1), ShardBuffers()
    commits._number = group.rank
    live = {"m/w": LiveShard(torch.ones(1), RowSpec((2,), torch.float32))}
    bank.arrange(live, 2, (group.rank,))
    bank.copy(live, CommitId(1, 0))
    place = ShardedWorld(1, group.rank, (0, 1), 2, ("a", "a"), ((), ()), {})
    commits._compare(group, place, bank, content=False)


def raise_at_once(group: FakeCollectives) -> None:
    found = [torch.zeros(1) for _ in range(2)]
    group.allgather(found, torch.ones(1)).wait()
    raise_together.raise_together(group, StateMismatch("the ranks differ"))


@pytest.mark.parametrize("find", [raise_at_once, compare_commits])
def test_no_rank_raises_before_all_ranks_have_found_the_error(find: Callable[[Any], None]):
    groups: list[Any] = world(2)
    waits = threading.Event()  # rank 0, for rank 1
    raised: dict[int, Exception] = {}
    before: list[Exception] = []
    barriers = [group.barrier for group in groups]

    def of_first() -> Any:
        work = barriers[0]()
        waits.set()
        return work

    def of_second() -> Any:
        waits.wait(10)
        before.extend(raised.values())
        return barriers[1]()

    groups[0].barrier, groups[1].barrier = of_first, of_second

    def run(rank: int) -> None:
        try:
            find(groups[rank])
        except Exception as error:
            raised[rank] = error
            waits.set()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert not before
    assert [type(raised.get(rank)) for rank in range(2)] == [StateMismatch, StateMismatch]
    assert all(group._calls == 2 for group in groups), "one collective finds, another one waits"


def test_rank_whose_peer_is_lost_still_raises_the_error():
    first, second = world(2)
    second.abort()
    with pytest.raises(StateMismatch):
        raise_together.raise_together(first, StateMismatch("the ranks differ"))
