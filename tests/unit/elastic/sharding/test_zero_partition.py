"""Parameters that are divided whole among shards, over drawn groups: torch's rule, and the moves between worlds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.sharding.resharding import order_of_shards, plan_moves
from elastic.sharding.row_layout import ShardLayout
from elastic.sharding.shard_inventory import CommitId, HeldShard, newest_whole
from elastic.sharding.zero_partition import Partition, PartitionedTensor

sizes = st.integers(1, 9)
partitions = st.lists(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple), min_size=1, max_size=3
).map(lambda groups: Partition(tuple(groups)))


def entries(partition: Partition) -> tuple[PartitionedTensor, ...]:
    elements = [each for group in partition.groups for each in group]
    return tuple(
        PartitionedTensor(f"{n}.exp_avg", rows, 4, partition=partition, number=n)
        for n, rows in enumerate(elements)
    )


@given(partitions, sizes)
def test_each_parameter_has_one_owner_and_the_largest_share_is_bounded(partition, shards: int):
    owners = partition.owners(shards)
    elements = [each for group in partition.groups for each in group]
    assert len(owners) == len(elements)
    loads = [sum(n for n, o in zip(elements, owners, strict=True) if o == s) for s in range(shards)]
    assert sum(loads) == sum(elements)
    assert max(loads) <= sum(elements) / shards + max(elements)


@given(partitions, sizes)
def test_one_shard_has_all_rows_of_a_tensor(partition, shards: int):
    for tensor in entries(partition):
        rows = [tensor.rows_of(shard, shards) for shard in range(shards)]
        assert sum(map(len, rows)) == tensor.rows
        having = [shard for shard, each in enumerate(rows) if len(each)]
        for each in rows:
            assert list(tensor.shards_with(each, shards)) == (having if len(each) else [])


@given(partitions, sizes)
def test_no_shard_has_more_bytes_than_the_largest(partition, shards: int):
    layout = ShardLayout(entries(partition), shards)
    assert layout.largest == max(layout.nbytes(shard) for shard in range(shards))


@given(partitions, sizes, sizes, st.data())
def test_new_owner_gets_all_rows_of_its_parameters_from_ranks_that_have_the_rows(
    partition, old: int, new: int, data: Any
):
    tensors = entries(partition)
    commit = CommitId(1, 1)
    held: list[list[HeldShard]] = [[] for _ in range(new)]
    for shard in range(old):
        for rank in data.draw(st.lists(st.integers(0, new - 1), min_size=1, max_size=2)):
            held[rank].append(HeldShard(commit, old, shard, False))
    whole = newest_whole([tuple(each) for each in held])
    assert whole is not None
    order = order_of_shards(whole, tensors, new)
    assert sorted(order) == list(range(new))
    moves = plan_moves(whole, tensors, order, ["host"] * new, 64)
    found: dict[int, list[int]] = {n: [] for n in range(len(tensors))}
    for move in moves:
        assert move.target == order[partition.owners(new)[move.tensor]]
        assert move.shard == partition.owners(old)[move.tensor]
        assert move.source in whole.holders[move.shard]
        found[move.tensor] += range(*move.rows)
    for number, tensor in enumerate(tensors):
        assert sorted(found[number]) == list(range(tensor.rows))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own import
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_owners_match_the_owners_of_torch(shards: int):
    torch = pytest.importorskip("torch")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    elements = ((7, 7, 1, 30, 4), (12, 30, 5), (9,))
    made: Any = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    made.param_groups = [{"params": [torch.zeros(n, device="cpu") for n in g]} for g in elements]
    made.world_size, made._partition_parameters_cache, made._param_to_rank_cache = shards, [], {}
    theirs = {id(parameter): rank for parameter, rank in made._param_to_rank.items()}
    ours = Partition(elements).owners(shards)
    parameters = [each for group in made.param_groups for each in group["params"]]
    assert [theirs[id(each)] for each in parameters] == list(ours)
