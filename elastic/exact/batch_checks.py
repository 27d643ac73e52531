"""Checks of the argument of `Shards.over`, the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sized

import torch

from elastic.data.loader import DataLoader, GivenShards, StepShards
from elastic.errors import Invalid


def check(batches: object, shards: GivenShards, committed: bool, *, verified: bool = False) -> None:
    """Raise Invalid if the batches would train every rank on the same samples, or on part of a batch.

    Args:
        batches: the argument of `Shards.over`.
        shards: the shards.
        committed: whether commits contain the step number. If so, they must also contain the position in the data.
        verified: whether shards are verified, which also needs batches of other ranks.
    """
    held, count = shards.held, shards.count
    if isinstance(batches, DataLoader):
        raise Invalid(
            "over() takes one step of a loader: write `for step in loader: for batch in shards.over(step):"
            " ...`, and create the loader with DataLoader(..., global_batch_size=64, shards=shards)"
        )
    if type(batches).__module__.startswith("torch.utils.data") or isinstance(
        batches, torch.utils.data.DataLoader
    ):  # The object may also be an iterator of a loader.
        raise Invalid(
            "torch's DataLoader does not support shards, so all ranks would train on the same batches: use"
            " elastic.data.DataLoader(dataset, global_batch_size=64, shards=shards), or"
            " elastic.data.from_torch(loader, global_batch_size=64, shards=shards)"
        )
    if isinstance(batches, torch.Tensor | Mapping) or _inputs_and_targets(batches):
        raise Invalid(
            f"over() got a single batch of type {type(batches).__name__}, but this rank has {len(held)} shards:"
            " pass one micro-batch per shard, or a step of elastic.data.DataLoader(..., shards=shards). To"
            " convert a torch loader, call elastic.data.from_torch(loader, global_batch_size=64, shards=shards)"
        )
    if verified and not (isinstance(batches, StepShards) and batches.loads_any):
        raise Invalid(
            "verify needs batches of other workers' shards, but these batches can't be loaded by index: pass"
            " over() a step of elastic.data.DataLoader(dataset, ..., shards=shards) with a map-style dataset,"
            " or iterate with `for shard in shards` and load the samples of each shard"
        )
    if isinstance(batches, Sized) and len(batches) != len(held):
        raise Invalid(
            f"over() got {len(batches)} micro-batches, but this rank has {len(held)} of the {count} shards: pass"
            " [batches[shard] for shard in shards.held], or a step of elastic.data.DataLoader(...,"
            " shards=shards)"
        )
    if not isinstance(batches, StepShards):
        return
    if batches.shards is not shards:
        raise Invalid(
            "the loader was created with another Shards object or with a number of shards: pass this Shards"
            " object, as in DataLoader(..., shards=shards)"
        )
    if not batches.taken and batches.held != list(held):
        raise Invalid(
            "the step was taken from its loader before the last commit, and the commit assigned other shards to"
            " this worker: take each step after the commit, as `for step in loader` does, or pass"
            " by_speed=False to Shards"
        )
    if held and batches.taken:
        raise Invalid(
            "the batches of this step were already used, and a loader returns each batch only once. To compute"
            " a step several times, as LBFGS does, keep the batches and their weights (batches = [(batch,"
            " loader.weight) for batch in step]), pass shards.over(batches), and create the loader with"
            " drop_last=True"
        )
    if committed and not batches.in_state:
        raise Invalid(
            "the loader is not in the state, so commits lack its position, and training would continue with"
            " other samples after a failure: add the loader, as in TorchState(..., shards=shards,"
            " loader=loader)"
        )


def _inputs_and_targets(batches: object) -> bool:
    """Return whether the value looks like a batch from a torch DataLoader, such as ``[inputs, targets]``.

    Micro-batches have one dtype and number of dimensions. Their sizes may differ, as with padded text.
    """
    if not isinstance(batches, list | tuple):
        return False
    tensors = [each for each in batches if isinstance(each, torch.Tensor)]
    return len({(each.dtype, each.ndim) for each in tensors}) > 1
