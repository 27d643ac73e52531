"""What `Shards.over` was given: whether it can be this rank's micro-batches of one step. Talks to nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sized

import torch

from elastic.data.loader import DataLoader, GivenShards, StepShards
from elastic.errors import Invalid


def check(batches: object, shards: GivenShards, committed: bool) -> None:
    """Raises Invalid for what would train every rank on the same samples, or on a part of one.

    ``committed``: commits have the number of the step, so they need the position in the data, too.
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
            "torch's DataLoader knows nothing of shards: each rank would train on the same batches, in each step"
            " again. Give elastic.data.DataLoader(dataset, global_batch_size=64, shards=shards) the dataset, or"
            " elastic.data.from_torch(loader, global_batch_size=64, shards=shards) the loader"
        )
    if isinstance(batches, torch.Tensor | Mapping) or _inputs_and_targets(batches):
        raise Invalid(
            f"over() was given a {type(batches).__name__} that is one batch; give a micro-batch for each of this rank's"
            f" shards, here {len(held)}, or a step of elastic.data.DataLoader(..., shards=shards), which"
            " elastic.data.from_torch(loader, global_batch_size=64, shards=shards) makes of torch's"
        )
    if isinstance(batches, Sized) and len(batches) != len(held):
        raise Invalid(
            f"over() was given {len(batches)} micro-batches, and this rank has {len(held)} of the"
            f" {count} shards: give it those, [batches[shard] for shard in shards.held], or a step of"
            " elastic.data.DataLoader(..., shards=shards)"
        )
    if not isinstance(batches, StepShards):
        return
    if batches.shards is not shards:
        raise Invalid(
            "the loader cuts steps into other shards than these, or into a number of them, which it deals in another"
            " way; give DataLoader(..., shards=shards) the Shards themselves"
        )
    if held and batches.taken:
        raise Invalid(
            "the batches of this step were taken before, and a loader hands each out once; where a step is computed"
            " several times, as LBFGS does, keep them with their weights, batches = [(batch, loader.weight) for batch"
            " in step], and give shards.over(batches); the loader needs drop_last=True then"
        )
    if committed and not batches.in_state:
        raise Invalid(
            "the loader is in no state, so a commit does not have its position, and after a failure other samples"
            " would be trained on: add it, as in TorchState(..., shards=shards, loader=loader)"
        )


def _inputs_and_targets(batches: object) -> bool:
    """Whether it is what a loader of torch gives for one step, as far as that shows: micro-batches have one dtype and
    as many dimensions. Their sizes may differ, as those of padded text do.
    """
    if not isinstance(batches, list | tuple):
        return False
    tensors = [each for each in batches if isinstance(each, torch.Tensor)]
    return len({(each.dtype, each.ndim) for each in tensors}) > 1
