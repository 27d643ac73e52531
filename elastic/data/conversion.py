"""Conversion of a torch loader to an elastic loader."""

from __future__ import annotations

from typing import Any

from torch.utils import data as torch_data

from elastic.data.loader import DataLoader
from elastic.data.sampler import ElasticSampler
from elastic.errors import Invalid


def from_torch(loader: Any, **changes: Any) -> DataLoader:
    """Create an elastic loader with the dataset, batch size, order and loader workers of a torch loader.

    ``loader`` is a ``torch.utils.data.DataLoader`` or a ``torchdata.stateful_dataloader.StatefulDataLoader``, and
    ``changes`` override its arguments. ``DistributedSampler``, ``ElasticSampler``, ``RandomSampler`` and
    ``SequentialSampler`` are converted to their shuffle and seed. Other samplers are iterated for their order in every
    epoch. The position of ``loader`` is not copied.

    Raises:
        Invalid: the loader cannot be converted.
    """
    if not isinstance(loader, torch_data.DataLoader):
        raise Invalid(
            f"{type(loader).__name__} is not a torch DataLoader: pass the dataset to elastic.data.DataLoader"
        )
    given: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers > 0:
        given["prefetch_factor"] = loader.prefetch_factor
    if loader.batch_size is None and loader.batch_sampler is not None:
        given["batch_sampler"] = loader.batch_sampler
    else:
        given.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
        if not isinstance(loader.dataset, torch_data.IterableDataset):
            given.update(_order_of(loader.sampler))
    if "global_batch_size" in changes and "batch_size" not in changes:
        # Restore the default value, because batch_size and global_batch_size are mutually exclusive.
        given["batch_size"] = 1
    given.update(changes)
    return DataLoader(loader.dataset, **given)


def _order_of(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, torch_data.DistributedSampler | ElasticSampler):
        return {"shuffle": sampler.shuffle, "seed": sampler.seed}
    if isinstance(sampler, torch_data.SequentialSampler):
        return {"shuffle": False}
    # Compare class names, because torchdata's RandomSampler is not a subclass of torch's.
    random = type(sampler).__name__ == "RandomSampler" and not sampler.replacement
    if random and sampler.num_samples == len(sampler.data_source):
        return {"shuffle": True}
    return {"sampler": sampler}
