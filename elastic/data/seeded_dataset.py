"""Loads each sample under seeds of its own: what is random in it is the same in whatever process loads it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, get_worker_info

from elastic.data.order import plant, seeded
from elastic.data.seeds import sample_seed


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose indices are pairs ``(epoch, index)``.

    ``dataset[index]`` finds the generators of torch (CPU), random and numpy seeded by a hash of seed, epoch and index.
    In the process that trains they are put back afterwards.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, drawn: tuple[int, Any]) -> Any:
        return self.__getitems__([drawn])[0]

    def __getitems__(self, drawn: list[tuple[int, Any]]) -> list[Any]:
        if get_worker_info() is not None:
            return [self._load(*each) for each in drawn]
        with seeded(0):
            return [self._load(*each) for each in drawn]

    def _load(self, epoch: int, index: Any) -> Any:
        plant(sample_seed(self._seed, epoch, index))
        return self.dataset[index]
