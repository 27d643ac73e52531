"""Cuts one stream of samples into steps, and gives a rank its part of each. Runs in loader workers.

A stream has no index. So every rank reads all of it, and a position is come to by reading what is before it, or by the
stream's own ``skip(n)``. What a rank gets is decided by a sample's place in the stream alone. With several loader
workers each reads the whole stream, and the n-th batch is cut by worker n modulo their number, which is the order in
which torch hands batches out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from elastic.data.order import kept, plant
from elastic.data.positions import Dealing, Position
from elastic.data.seeds import batch_seed, sample_seed, seed_of

# Where its step begins and ends, the part's number, its samples.
Cut = tuple[int, int, int, list[Any]]
END = object()
NOBODY = -1  # in place of a part, where a rank has none of a step


class StreamDataset(IterableDataset[Any]):
    """Parts of the steps of ``source``, from where `deal` says on. ``seed``: each sample is read, and each part made a
    batch by ``collate``, under seeds of its own. Loader workers that persist are told by shared memory.
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
        self._worker: tuple[int, int] | None = None  # in a loader worker: which, of how many
        self._told = torch.zeros(6 + most_parts, dtype=torch.int64, device="cpu").share_memory_()

    def deal(self, position: Position, dealing: Dealing, mine: list[int]) -> None:
        """What the next iteration gives: of each step from ``position`` on the parts ``mine``."""
        numbers = [position.epoch, position.consumed, dealing.parts, dealing.batch]
        numbers += [int(dealing.drop_last), len(mine), *mine]
        self._told[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def __iter__(self) -> Iterator[tuple[int, int, int, Any]]:
        """Where a step begins and ends, a part's number, and its batch."""
        epoch, consumed, parts, batch, drop_last, number, *mine = self._told.tolist()
        dealing = Dealing(parts, batch, bool(drop_last))
        info = get_worker_info()
        if info is not None:
            self._worker = info.id, info.num_workers
            # A dataset that deals itself out to loader workers would give each of them another stream.
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
        """The rest of an epoch's stream."""
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
    """Whatever is random in a stream from its beginning on, so that it is the same stream each time it is read."""
    plant(seed_of("order", seed, epoch))
    samples = iter(source)
    for index in count():
        plant(sample_seed(seed, epoch, index))
        sample = next(samples, END)
        if sample is END:
            return
        yield sample


def _apart(batches: Iterator[Any]) -> Iterator[Any]:
    """In the process that trains: what loading a batch draws is not drawn from its generators."""
    while True:
        with kept():
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def _steps(samples: Iterator[Any], dealing: Dealing, start: int) -> Iterator[tuple[range, Any]]:
    """Steps and their samples. Reads as far ahead as it takes to know how large a step is."""
    ahead: deque[Any] = deque()
    while True:
        ahead.extend(islice(samples, dealing.reach - len(ahead)))
        size = dealing.size(len(ahead))
        if size == 0:
            return
        yield range(start, start + size), [ahead.popleft() for _ in range(size)]
        start += size


def _cuts(
    steps: Iterator[tuple[range, list[Any]]], dealing: Dealing, mine: list[int]
) -> Iterator[Cut]:
    for step, samples in steps:
        for part in mine:
            if part == NOBODY:  # it only hears of the step
                yield step.start, step.stop, part, []
                continue
            # A part without samples is given one all the same, which is not to count.
            some = dealing.part(step, part) or step[:1]
            chosen = samples[some.start - step.start : some.stop - step.start]
            yield step.start, step.stop, part, chosen
