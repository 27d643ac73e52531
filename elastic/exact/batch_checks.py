"""Check of the argument of `Shards.over`: this rank's micro-batches of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sized

import torch

from elastic.data.loader import DataLoader, GivenShards, StepShards
from elastic.errors import Invalid


def check(batches: object, shards: GivenShards, committed: bool, *, verified: bool = False) -> None:
    """Raise Invalid for batches that would train every rank on the same samples, or on part of a batch.

    Args:
        batches: the argument of `Shards.over`.
        shards: the shards.
        committed: commits contain the number of the step, so they must contain the position in the data, too.
        verified: batches of other ranks are needed, too.
    """
    held, count = shards.held, shards.count
    if isinstance(batches, DataLoader):
        raise Invalid(
            "over() takes one step of a loader: `for step in loader: for batch in shards.over(step): ...`, with"
            " DataLoader(..., global_batch_size=64, shards=shards)"
        )
    if type(batches).__module__.startswith("torch.utils.data") or isinstance(
        batches, torch.utils.data.DataLoader
    ):  # or its iterator
        raise Invalid(
            "torch's DataLoader ignores shards, so all ranks would train on the same batches: use"
            " elastic.data.DataLoader(dataset, global_batch_size=64, shards=shards), or"
            " elastic.data.from_torch(loader, global_batch_size=64, shards=shards)"
        )
    if isinstance(batches, torch.Tensor | Mapping) or _inputs_and_targets(batches):
        raise Invalid(
            f"over() got a {type(batches).__name__} that is one batch: pass one micro-batch for each of this rank's"
            f" shards, here {len(held)}, or a step of elastic.data.DataLoader(..., shards=shards), which"
            " elastic.data.from_torch(loader, global_batch_size=64, shards=shards) creates from torch's"
        )
    if verified and not (isinstance(batches, StepShards) and batches.loads_any):
        raise Invalid(
            "verify needs batches of other workers' shards, which only a loader with indices can load: pass over() a"
            " step of elastic.data.DataLoader(dataset, ..., shards=shards), whose dataset has __len__ and __getitem__,"
            " or iterate over numbers, `for shard in shards`, and load the samples of each"
        )
    if isinstance(batches, Sized) and len(batches) != len(held):
        raise Invalid(
            f"over() got {len(batches)} micro-batches, but this rank has {len(held)} of the {count} shards: pass"
            " those, [batches[shard] for shard in shards.held], or a step of elastic.data.DataLoader(...,"
            " shards=shards)"
        )
    if not isinstance(batches, StepShards):
        return
    if batches.shards is not shards:
        raise Invalid(
            "the loader was created with another Shards object, or with a number of shards: pass this Shards object,"
            " as in DataLoader(..., shards=shards)"
        )
    if not batches.taken and batches.held != list(held):
        raise Invalid(
            "this step was taken from its loader before the last commit, which has assigned other shards to this"
            " worker: take a step after the commit, as `for step in loader` does, or pass by_speed=False to Shards"
        )
    if held and batches.taken:
        raise Invalid(
            "the batches of this step were already used, and a loader returns each once: to compute a step several"
            " times, as LBFGS does, keep them with their weights, batches = [(batch, loader.weight) for batch in"
            " step], and pass shards.over(batches); the loader then needs drop_last=True"
        )
    if committed and not batches.in_state:
        raise Invalid(
            "the loader is not in the state, so commits lack its position and training would "
            "continue with other samples after a failure: add it, as in TorchState(..., "
            "shards=shards, loader=loader)"
        )


def _inputs_and_targets(batches: object) -> bool:
    """Return whether the value looks like a batch of a torch loader.

    Micro-batches have one dtype and number of dimensions; their sizes may differ, as with padded text.
    """
    if not isinstance(batches, list | tuple):
        return False
    tensors = [each for each in batches if isinstance(each, torch.Tensor)]
    return len({(each.dtype, each.ndim) for each in tensors}) > 1
