"""Division of a stream of samples into steps, and of each step into one part per rank.

This module runs in loader workers.

A stream has no index. Every rank therefore reads the whole stream, and reaches a position by reading all samples before
that position or by calling the stream's own ``skip(n)``. The rank that a sample is assigned to depends only on the
sample's index in the stream. With W loader workers, each reads the whole stream and worker ``n % W`` creates batch n,
because torch returns batches in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from elastic.data.sample_order import kept, plant
from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.seeds import batch_seed, sample_seed, seed_of

# start and end of a step, the number of a part, and the part's samples
Cut = tuple[int, int, int, list[Any]]
END = object()
NOBODY = -1  # placeholder for a rank without a part of the step


class StreamDataset(IterableDataset[Any]):
    """Dataset of the parts of the stream's steps, from the position that was passed to `deal`.

    Persistent loader workers receive the position through shared memory.

    Args:
        seed: seed from which the seeds of each sample and each part are derived, or None for no seeding.
    """

    def __init__(
        self,
        source: Iterable[Any],
        most_parts: int,
        seed: int | None,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._source = source
        self._seed = seed
        self._collate = collate
        # index of this loader worker and the number of loader workers, or None in the training process
        self._worker: tuple[int, int] | None = None
        self._assignment = torch.zeros(
            6 + most_parts, dtype=torch.int64, device="cpu"
        ).share_memory_()

    def deal(self, position: Position, dealing: SamplePartition, mine: list[int]) -> None:
        """Make the next iteration start at ``position`` and return the parts with the numbers ``mine`` of each step."""
        numbers = [position.epoch, position.consumed, dealing.parts, dealing.batch]
        numbers += [int(dealing.drop_last), len(mine), *mine]
        self._assignment[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def __iter__(self) -> Iterator[tuple[int, int, int, Any]]:
        """Yield, for each part, the start and end of its step, the number of the part, and its batch."""
        epoch, consumed, parts, batch, drop_last, number, *mine = self._assignment.tolist()
        dealing = SamplePartition(parts, batch, bool(drop_last))
        info = get_worker_info()
        if info is not None:
            self._worker = info.id, info.num_workers
            # Make get_worker_info() return None in the dataset: each worker must read the whole stream, not its own
            # part.
            loader_worker._worker_info = None
        samples = self._samples(epoch, consumed)
        cuts = _cuts(_steps(samples, dealing, consumed), dealing, mine[:number])
        if self._worker is not None:
            cuts = islice(cuts, self._worker[0], None, self._worker[1])
        batches = (self._collated(epoch, *cut) for cut in cuts)
        return batches if self._seed is None or self._worker is not None else _apart(batches)

    def _collated(
        self, epoch: int, start: int, stop: int, part: int, samples: list[Any]
    ) -> tuple[int, int, int, Any]:
        if part == NOBODY:
            return start, stop, part, None
        if self._seed is None:
            return start, stop, part, self._collate(samples)
        plant(batch_seed(self._seed, epoch, start, part))
        return start, stop, part, self._collate(samples)

    def _samples(self, epoch: int, consumed: int) -> Iterator[Any]:
        source: Any = self._source
        set_epoch = getattr(source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if self._seed is not None:
            return islice(_seeded(source, self._seed, epoch), consumed, None)
        if consumed and callable(getattr(source, "skip", None)):
            return iter(source.skip(consumed))
        return islice(source, consumed, None)


def _seeded(source: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    plant(seed_of("order", seed, epoch))
    samples = iter(source)
    for index in count():
        plant(sample_seed(seed, epoch, index))
        sample = next(samples, END)
        if sample is END:
            return
        yield sample


def _apart(batches: Iterator[Any]) -> Iterator[Any]:
    """Load batches in the training process without drawing from its generators."""
    while True:
        with kept():
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def _steps(
    samples: Iterator[Any], dealing: SamplePartition, start: int
) -> Iterator[tuple[range, Any]]:
    """Yield each step with its samples.

    Only the samples that are needed to compute the size of the step are read ahead.
    """
    ahead: deque[Any] = deque()
    while True:
        ahead.extend(islice(samples, dealing.reach - len(ahead)))
        size = dealing.size(len(ahead))
        if size == 0:
            return
        yield range(start, start + size), [ahead.popleft() for _ in range(size)]
        start += size


def _cuts(
    steps: Iterator[tuple[range, list[Any]]], dealing: SamplePartition, mine: list[int]
) -> Iterator[Cut]:
    for step, samples in steps:
        for part in mine:
            if part == NOBODY:  # Only the bounds of the step are needed.
                yield step.start, step.stop, part, []
                continue
            # A part without samples gets a placeholder, whose loss and gradients must not count.
            some = dealing.part(step, part) or step[:1]
            chosen = samples[some.start - step.start : some.stop - step.start]
            yield step.start, step.stop, part, chosen
