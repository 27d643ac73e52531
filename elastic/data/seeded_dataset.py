"""Dataset that seeds the random generators per sample, so that augmentation does not depend on the loading process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from elastic.data.sample_order import kept, plant


class SeededDataset(Dataset[Any]):
    """Map-style dataset that is indexed by batches of pairs: a seed, and the indices to load under that seed.

    The generators of torch (CPU), random and numpy are seeded before these indices are loaded. ``collate`` makes a
    batch of all samples and continues with the generators of the last pair. If ``restores`` is true, as required in the
    training process, the generators are restored afterwards. Restoring takes twenty times as long as seeding.
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
        # torch's loader calls this method, if it exists, to fetch all samples of a batch at once.
        together = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = []
        for seed, indices in drawn:
            plant(seed)
            samples += together(indices) if together else [self.dataset[each] for each in indices]
        return self._collate(samples)


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged.

    This function is used as the collate function of torch's loader if the dataset returns whole batches.
    """
    return batch
