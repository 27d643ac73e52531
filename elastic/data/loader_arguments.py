"""Arguments of a loader, validated before any sample is loaded."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch.utils.data import IterableDataset

from elastic.data.sample_partition import SamplePartition
from elastic.errors import Invalid

OPTIONS = {
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
    "in_order",
}


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is iterable, so that samples are read in sequence and cannot be indexed."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class Seeds(Enum):
    """Unit of data that is loaded under its own random seeds: a sample or a batch."""

    SAMPLE = "sample_seeds"
    BATCH = "batch_seeds"


@dataclass(frozen=True)
class LoaderArguments:
    """The checked arguments of a `DataLoader`. Raises Invalid if a value is out of range or two arguments conflict."""

    dataset: Any
    batch_size: int | None = 1
    shuffle: bool = False
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Sequence[Any]] | None = None
    num_workers: int = 0
    collate_fn: Any = None
    drop_last: bool = False
    global_batch_size: int | None = None
    seed: int = 0
    seeds: Seeds | None = None
    shards: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of torch's DataLoader

    def __post_init__(self) -> None:
        for name in ("batch_size", "global_batch_size", "shards"):
            _check_size(name, getattr(self, name))
        operator.index(self.seed)
        self._check_options()
        if self.streams:
            self._check_stream()
        else:
            self._check_indexed()
        self._check_batches()

    @property
    def streams(self) -> bool:
        return is_stream(self.dataset)

    @property
    def ready(self) -> bool:
        """Return whether each sample of the dataset is already a batch."""
        return self.batch_size is None or self.batch_sampler is not None

    def dealing(self, size: int) -> SamplePartition:
        """Return the partition of steps among the ranks of a world of ``size`` ranks."""
        if self.global_batch_size is not None:
            return SamplePartition(self.shards or size, self.global_batch_size, self.drop_last)
        each = 1 if self.ready or self.batch_size is None else self.batch_size
        return SamplePartition(size, size * each, self.drop_last)

    def _check_options(self) -> None:
        unknown = self.options.keys() - OPTIONS
        if "generator" in unknown:
            raise Invalid(
                "generator= would give each rank a different order: pass seed=, and all ranks use the same"
                " order"
            )
        if unknown:
            raise Invalid(
                f"DataLoader has no argument {', '.join(sorted(unknown))}: correct the name of the argument, or omit"
                " it"
            )
        if self.options.get("in_order") is False:
            raise Invalid(
                "in_order=False returns batches in no fixed order, so commits could not record the samples that"
                " were used: omit in_order"
            )

    def _check_stream(self) -> None:
        dataset, name = self.dataset, type(self.dataset).__name__
        if not hasattr(dataset, "__iter__"):
            raise Invalid(f"{name} supports neither indexing nor iteration: pass a dataset")
        if isinstance(dataset, Iterator):
            raise Invalid(
                f"{name} can be iterated over only once, but the loader must iterate again after a failure: pass"
                " a dataset whose __iter__ returns a new iterator"
            )
        if self.shuffle or self.sampler is not None or self.batch_sampler is not None:
            raise Invalid(
                f"{name} is a stream, so the loader can't change its order: remove shuffle and sampler, and"
                " shuffle inside the dataset with a seed that depends on the epoch passed to set_epoch()"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise Invalid(
                f"{name} was split by split_dataset_by_node() for a fixed number of ranks: pass the whole"
                " dataset, and the loader divides it among the ranks of the current world"
            )

    def _check_indexed(self) -> None:
        if not hasattr(self.dataset, "__len__"):
            raise Invalid(
                f"{type(self.dataset).__name__} has no length: add __len__, or make it an IterableDataset"
            )
        if len(self.dataset) == 0:
            raise Invalid("the dataset is empty: add at least one sample")
        given = {
            "shuffle": self.shuffle,
            "sampler": self.sampler is not None,
            "batch_sampler": self.batch_sampler is not None,
        }
        names = [name for name, there in given.items() if there]
        if len(names) > 1:
            raise Invalid(f"{' and '.join(names)} each define the order: pass only one of them")
        for each in (
            self.sampler,
            self.batch_sampler,
            getattr(self.batch_sampler, "sampler", None),
        ):
            if hasattr(each, "num_replicas"):
                raise Invalid(
                    f"{type(each).__name__} divides samples among a fixed number of ranks, but this loader must"
                    " divide them again in each world: pass shuffle= and seed= instead, or convert the loader"
                    " with elastic.data.from_torch()"
                )

    def _check_batches(self) -> None:
        if self.global_batch_size is not None and (self.batch_size != 1 or self.ready):
            raise Invalid(
                "global_batch_size already sets the batch size: omit batch_size and batch_sampler"
            )
        if self.batch_sampler is not None and (self.batch_size != 1 or self.drop_last):
            raise Invalid(
                "batch_sampler already defines the batches: omit batch_size and drop_last"
            )
        if self.shards is None:
            return
        if self.global_batch_size is None:
            raise Invalid("shards requires global_batch_size: also pass global_batch_size")
        if self.global_batch_size < self.shards:
            raise Invalid(
                f"global_batch_size={self.global_batch_size} can't be divided into {self.shards} shards: pass at"
                " least one sample per shard"
            )


def _check_size(name: str, size: Any) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise Invalid(f"{name} is {size!r}: pass a whole number of samples, at least 1")
