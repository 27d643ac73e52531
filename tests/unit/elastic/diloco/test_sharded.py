"""Rows of sharded tensors that an island gathers and scatters, the islands that lack merges, and refusals."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic
from elastic.diloco import sharded
from elastic.diloco.diloco import lacking_islands
from elastic.diloco.island_group import IslandGroup
from elastic.diloco.islands import Islands
from elastic.diloco.rounds import WorldReport
from elastic.diloco.sharded import ShardedIsland, TensorShape, divided, gathered, sharded_island
from elastic.errors import Invalid
from harness.fakes.process_group import only_rank
from harness.golden import raises

distributed: Any = torch.distributed
SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)


@given(SHAPES, st.integers(1, 6))
def test_scattered_rows_are_those_of_torch_chunk_and_gather_to_the_whole_tensors(sizes, shards):
    shapes = [TensorShape(tuple(each)) for each in sizes]
    wholes = [torch.arange(float(torch.Size(each).numel())).view(each) for each in sizes]
    flat = torch.cat([each.reshape(-1) for each in wholes])
    found = divided(flat, shapes, shards)
    for number, whole in enumerate(wholes):
        chunks = [*whole.chunk(shards)]
        chunks += [whole[:0]] * (shards - len(chunks))
        assert all(torch.equal(found[n][number], each.reshape(-1)) for n, each in enumerate(chunks))
    parts = [torch.cat(each) for each in found]
    assert [len(each) for each in parts] == [
        sum(each.elements(shard, shards) for each in shapes) for shard in range(shards)
    ]
    assert torch.equal(gathered(parts, shapes), flat)


def report(*merged: int) -> str:
    return json.dumps(WorldReport(9, list(merged), None, (1, 0), [], False))


@pytest.mark.parametrize(
    ("reports", "leaders", "lacking"),
    [
        ([report(2, 1)] * 3, [0, 2], ()),
        ([report(2, 1), report(2, 1), report(2, 2)], [0, 2], (0,)),
        ([report(3, 2), report(2, 2), report(2, 2)], [0, 1, 2], (1, 2)),
        ([report(0, 0), report(3, 2)], [0, 1], (0,)),
    ],
)
def test_islands_with_fewer_merges_than_others_lack_merges(reports, leaders, lacking):
    assert lacking_islands(reports, leaders) == lacking


def test_plain_model_is_not_sharded():
    assert sharded_island(torch.nn.Linear(2, 1)) is None


def test_mesh_without_torch_distributed_is_refused():
    assert not distributed.is_initialized()
    with raises(Invalid):
        elastic.island_mesh("cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_model_that_is_sharded_over_all_ranks_is_refused():
    from torch.distributed.fsdp import fully_shard

    with only_rank(1, 4):
        model: Any = fully_shard(torch.nn.Linear(8, 1))
        with raises(Invalid):
            elastic.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_worker_with_another_rank_in_an_island_of_the_same_ranks_gets_the_rows_of_this_rank(
    monkeypatch,
):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def enter(rank: int) -> None:
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)

    enter(1)
    try:
        model: Any = fully_shard(torch.nn.Linear(2, 5), mesh=init_device_mesh("cpu", (2,)))
        rows = [len(model.weight.to_local())]
        distributed.destroy_process_group()
        enter(0)
        group = create_autospec(IslandGroup, instance=True)
        group.islands, group.getRank.return_value = Islands(("west", "west"), 0), 0
        monkeypatch.setattr(sharded, "_mesh", lambda *_: init_device_mesh("cpu", (2,)))
        ShardedIsland(model, group).follow()
        rows.append(len(model.weight.to_local()))
    finally:
        distributed.destroy_process_group()
    assert rows == [2, 3]
