"""Loads each sample under seeds of its own: what is random in it is the same in whatever process loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from elastic.data.order import plant, seeded
from elastic.data.seeds import sample_seed


class SeededDataset(Dataset[Any]):
    """A map-style dataset that is asked for batches: an epoch, and indices.

    ``dataset[index]`` finds the generators of torch (CPU), random and numpy seeded by a hash of seed, epoch and index;
    ``collate`` makes a batch of the samples, and draws on from those of the last one. In the process that trains they
    are put back afterwards, while it ``restores`` them: that takes as long as seeding them twenty times.
    """

    restores = True

    def __init__(self, dataset: Any, seed: int, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._seed = seed
        self._collate = collate

    def __getitems__(self, drawn: tuple[int, list[Any]]) -> Any:
        if not self.restores or get_worker_info() is not None:
            return self._load(*drawn)
        with seeded(0):
            return self._load(*drawn)

    def _load(self, epoch: int, indices: list[Any]) -> Any:
        found = []
        for index in indices:
            plant(sample_seed(self._seed, epoch, index))
            found.append(self.dataset[index])
        return self._collate(found)


def as_it_is(batch: Any) -> Any:
    """For torch's loader, where the dataset gives whole batches."""
    return batch
