"""Utilities for torch's ZeroRedundancyOptimizer: check that it is supported, and repartition it in another world.

Private names of torch are used (see `tested_torch`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from elastic.sharding import tested_torch
from elastic.sharding.zero_partition import Partition


def is_zero(optimizer: object) -> bool:
    """Return whether the optimizer is a ZeroRedundancyOptimizer. This function does not import that class's module."""
    known = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(known, "ZeroRedundancyOptimizer", None)
    return isinstance(kind, type) and isinstance(optimizer, kind)


def is_divided(optimizer: object) -> bool:
    """Return whether the optimizer is a DistributedOptimizer with ``zero=1``."""
    return hasattr(optimizer, "zero_order")


def parameters(zero: Any) -> list[torch.Tensor]:
    """Return the parameters of all ranks in one list, group by group."""
    return [each for group in zero.param_groups for each in group["params"]]


def partition_of(zero: Any) -> Partition:
    return Partition(
        tuple(tuple(each.numel() for each in group["params"]) for group in zero.param_groups)
    )


def obstacle(zero: Any) -> str | None:
    """Return the reason why this optimizer cannot be used in another world, or None if it can."""
    if why := tested_torch.untested("is a ZeroRedundancyOptimizer"):
        return why
    if zero._overlap_with_ddp:
        return (
            "has overlap_with_ddp=True, which updates parameters during the backward pass: an interrupted pass would"
            " leave a mix of the parameters of two steps"
        )
    if hasattr(zero, "gradient_layout"):
        return "is a ZeroRedundancyOptimizer in a DistributedOptimizer, and both would reduce gradients"
    if zero.process_group is not torch.distributed.group.WORLD:
        return "uses a separate process group, which does not follow the world"
    if any(hasattr(each, "device_mesh") for each in parameters(zero)):
        return "trains DTensors, which are already divided among ranks"
    if not steps_shard(zero, partition_of(zero), zero.rank, zero.world_size):
        return "does not divide parameters among ranks as torch's ZeroRedundancyOptimizer does"
    return None


def steps_shard(zero: Any, partition: Partition, shard: int, shards: int) -> bool:
    """Return whether this rank steps exactly the parameters of the given shard."""
    stepped = {id(each) for group in zero.optim.param_groups for each in group["params"]}
    owned = zip(parameters(zero), partition.owners(shards), strict=True)
    return stepped == {id(each) for each, owner in owned if owner == shard}


def repartition(zero: Any, order: Sequence[int], rank: int) -> None:
    """Divide the parameters among the ranks of another world, in place.

    This function discards the entries of the optimizer's state.

    Args:
        zero: optimizer to repartition.
        order: rank of each shard, in shard order.
        rank: this rank.
    """
    owners = iter(partition_of(zero).owners(len(order)))
    zero.world_size, zero.rank, zero.global_rank = len(order), rank, rank
    zero._clear_cache()
    zero._partition_parameters_cache = [[] for _ in order]
    for group in zero.param_groups:
        by_rank: list[list[torch.Tensor]] = [[] for _ in order]
        for parameter in group["params"]:
            by_rank[order[next(owners)]].append(parameter)
        zero._partition_param_group(group, by_rank)
    zero._init_local_optimizer()
    zero._build_param_buckets()
    zero._all_state_dicts = []  # Drop the state dicts that were consolidated in the previous world.
