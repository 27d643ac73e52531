"""Sources of the samples assigned to a rank. torch's DataLoader loads them by index or from a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import data as torch_data

from elastic.data import sample_order
from elastic.data.loader_arguments import LoaderArguments, Seeds
from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.seeded_dataset import SeededDataset, as_it_is
from elastic.data.seeds import batch_seed, sample_seed
from elastic.data.stream_dataset import NOBODY, StreamDataset
from elastic.errors import Invalid

Collate = Callable[[Any], Any]
Loaded = tuple[range, int, Any]  # the step, the number of the part, and the part's batch


class Source(Protocol):
    """Interface by which a loader reads a dataset.

    Attributes:
        seeded: dataset that seeds the random generators before each sample, or None.
    """

    seeded: SeededDataset | None

    def length(self, epoch: int) -> int | None:
        """Return the number of samples in an epoch, or None for a stream, whose length is unknown."""

    def begin(
        self, position: Position, dealing: SamplePartition, mine: list[int]
    ) -> Iterator[Loaded]:
        """Yield the loaded parts of all steps from ``position`` to the end of the epoch.

        ``mine`` contains the numbers of the parts to load in each step.

        A part without samples gets a placeholder, whose loss and gradients must not count.
        """

    def ids(self, epoch: int, places: range) -> list[int]:
        """Return the IDs of the samples at the given positions of the epoch's order."""

    def load(self, epoch: int, dealing: SamplePartition, step: range, part: int) -> Any:
        """Load one part of a step in this process, with the same result as `begin`."""


class IndexedSource:
    """Source of the samples of a map-style dataset."""

    def __init__(self, arguments: LoaderArguments) -> None:
        self._arguments = arguments
        self._order = _order(arguments)
        self._indices = _Indices()
        dataset, collate = arguments.dataset, _collate(arguments)
        self.seeded = SeededDataset(dataset, collate) if arguments.seeds else None
        self._loader = torch_data.DataLoader(
            dataset if self.seeded is None else self.seeded,
            batch_sampler=self._indices,
            collate_fn=collate if self.seeded is None else as_it_is,
            **_options(arguments),
        )

    def length(self, epoch: int) -> int | None:
        length = len(self._arguments.dataset)
        if self._arguments.sampler is None and self._arguments.batch_sampler is None:
            return length
        return len(self._order.of(length, epoch))

    def begin(
        self, position: Position, dealing: SamplePartition, mine: list[int]
    ) -> Iterator[Loaded]:
        length, arguments = self.length(position.epoch) or 0, self._arguments
        drawn = self._order.of(len(arguments.dataset), position.epoch)

        # batches that were requested and not handed out yet
        asked: deque[tuple[range, int]] = deque()

        def indices() -> Iterator[Any]:
            for step in dealing.rest(position.consumed, length):
                for part in mine:
                    asked.append((step, part))
                    places = dealing.part(step, part) or step[:1]
                    found = _drawn(drawn, places, arguments)
                    yield _under_seeds(found, position.epoch, step.start, part, arguments)

        if not mine:
            return ((step, NOBODY, None) for step in dealing.rest(position.consumed, length))
        self._indices.make = indices
        return ((*asked.popleft(), batch) for batch in iter(self._loader))

    def load(self, epoch: int, dealing: SamplePartition, step: range, part: int) -> Any:
        arguments, dataset = self._arguments, self._loader.dataset
        drawn = self._order.of(len(arguments.dataset), epoch)
        found = _drawn(drawn, dealing.part(step, part) or step[:1], arguments)
        keys = _under_seeds(found, epoch, step.start, part, arguments)
        together = getattr(dataset, "__getitems__", None)
        return self._loader.collate_fn(
            together(keys) if together else [dataset[each] for each in keys]
        )

    def ids(self, epoch: int, places: range) -> list[int]:
        drawn = self._order.of(len(self._arguments.dataset), epoch)
        found = _listed(drawn[places.start : places.stop])
        return (
            found
            if self._arguments.batch_sampler is None
            else [each for some in found for each in some]
        )


class StreamSource:
    """Source of the samples of an iterable dataset."""

    def __init__(self, arguments: LoaderArguments) -> None:
        self._arguments = arguments
        self.seeded: SeededDataset | None = None
        seed = arguments.seed if arguments.seeds else None
        self._dataset = StreamDataset(
            arguments.dataset, arguments.shards or 1, seed, _collate(arguments)
        )
        self._loader = torch_data.DataLoader(
            self._dataset, batch_size=None, collate_fn=as_it_is, **_options(arguments)
        )

    def length(self, epoch: int) -> int | None:
        try:
            return len(self._arguments.dataset)
        except TypeError:
            return None

    def begin(
        self, position: Position, dealing: SamplePartition, mine: list[int]
    ) -> Iterator[Loaded]:
        self._dataset.deal(position, dealing, mine or [NOBODY])
        return (
            (range(start, stop), part, batch) for start, stop, part, batch in iter(self._loader)
        )

    def load(self, epoch: int, dealing: SamplePartition, step: range, part: int) -> Any:
        raise Invalid("a stream does not support random access: pass a map-style dataset")

    def ids(self, epoch: int, places: range) -> list[int]:
        return list(places)


class _Indices:
    """Batch sampler of torch's loader, which iterates over it once per pass."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class _CollateOne:
    """Collate function for samples that are already batches."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples[0])


def _one(arguments: LoaderArguments) -> bool:
    return arguments.batch_size is None and arguments.batch_sampler is None


def _collate(arguments: LoaderArguments) -> Collate:
    one = _one(arguments)
    default: Collate = torch_data.default_convert if one else torch_data.default_collate
    collate = default if arguments.collate_fn is None else arguments.collate_fn
    return _CollateOne(collate) if one else collate


def _options(arguments: LoaderArguments) -> dict[str, Any]:
    # Without this argument, torch would draw from the training process's default generator in each iteration.
    generator = torch.Generator(device="cpu").manual_seed(arguments.seed)
    return {"num_workers": arguments.num_workers, "generator": generator, **arguments.options}


def _order(arguments: LoaderArguments) -> sample_order.EpochOrder:
    if arguments.batch_sampler is not None:
        return sample_order.drawn_by(arguments.batch_sampler, arguments.seed, "batch_sampler")
    if arguments.sampler is not None:
        return sample_order.drawn_by(arguments.sampler, arguments.seed, "sampler")
    epoch_order = getattr(arguments.dataset, "epoch_order", None)
    if arguments.shuffle and callable(epoch_order):
        return sample_order.EpochOrder(lambda _, epoch: epoch_order(arguments.seed, epoch))
    return sample_order.permutation(arguments.shuffle, arguments.seed)


def _listed(some: Any) -> list[Any]:
    listed: list[Any] = some if isinstance(some, list) else some.tolist()
    return listed


def _drawn(drawn: Any, places: range, arguments: LoaderArguments) -> list[Any]:
    found = _listed(drawn[places.start : places.stop])
    return found if arguments.batch_sampler is None else list(found[0])


def _under_seeds(
    indices: list[Any], epoch: int, start: int, part: int, arguments: LoaderArguments
) -> list[Any]:
    if arguments.seeds is Seeds.SAMPLE:
        return [(sample_seed(arguments.seed, epoch, index), [index]) for index in indices]
    if arguments.seeds is Seeds.BATCH:
        return [(batch_seed(arguments.seed, epoch, start, part), indices)]
    return indices
