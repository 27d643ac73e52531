"""Loads samples under seeds that belong to them: what is random in them is the same in whatever process loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from elastic.data.order import kept, plant


class SeededDataset(Dataset[Any]):
    """A map-style dataset that is asked for a batch: seeds, each with the indices that are loaded under it.

    The generators of torch (CPU), random and numpy are seeded before those indices are asked for; ``collate`` makes a
    batch of all samples, and draws on from those of the last one. In the process that trains they are put back
    afterwards, while it ``restores`` them: that takes as long as seeding them twenty times.
    """

    restores = True

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitems__(self, drawn: list[tuple[int, list[Any]]]) -> Any:
        if not self.restores or get_worker_info() is not None:
            return self._load(drawn)
        with kept():
            return self._load(drawn)

    def _load(self, drawn: list[tuple[int, list[Any]]]) -> Any:
        together = getattr(self.dataset, "__getitems__", None)  # as torch's loader asks for many
        samples: list[Any] = []
        for seed, indices in drawn:
            plant(seed)
            samples += together(indices) if together else [self.dataset[each] for each in indices]
        return self._collate(samples)


def as_it_is(batch: Any) -> Any:
    """For torch's loader, where the dataset gives whole batches."""
    return batch
