"""Sampler that divides an epoch's samples among the workers, and again whenever the world changes.

The epoch has one order, the same on all workers. Round r of a partition is the next ``num_replicas`` samples of that
order, one per rank. The samples that all workers have finished are therefore always a prefix of the order. The length
of this prefix is a single number, and does not depend on information from a failed rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from elastic.data import sample_order
from elastic.errors import Invalid
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle


class ElasticSampler(Sampler[int]):
    """Sampler with which committed steps use each sample once per epoch, except repeats that fill the last round.

    `elastic.data.DataLoader` needs no repeats and no ``record_batch``.

    Call ``record_batch`` after each batch, ``set_epoch`` at the *end* of each epoch (it clears the progress), and put
    the sampler in the state.

    Args:
        dataset: sized dataset whose indices are sampled.
        shuffle: whether to shuffle the indices in each epoch.
        seed: seed of the order, the same on all ranks.

    Attributes, as in Horovod: ``dataset``, ``shuffle``, ``seed``, ``epoch``, ``num_replicas``, ``rank``,
    ``remaining_indices`` (unfinished samples, in order), ``num_samples`` (of this rank, repeats included),
    ``total_size`` (of all ranks), ``processed_num`` (samples that all ranks together have finished in this epoch).

    Raises:
        Invalid: ``dataset`` is empty or has no length.

    Example::

        sampler = elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = elastic.TorchState(model=model, sampler=sampler)
        for number, batch in enumerate(loader):
            train_step(model, batch)
            sampler.record_batch(number, 32)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        try:
            length = len(dataset)
        except TypeError as error:
            raise Invalid(
                f"{type(dataset).__name__} has no length, so ElasticSampler can't divide its indices: pass a"
                " map-style dataset"
            ) from error
        if length == 0:
            raise Invalid("the dataset is empty: ElasticSampler needs at least one sample")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.num_replicas = 0
        self.rank = 0
        self.num_samples = 0
        self.total_size = 0
        self._noting = worker_settings.digests()
        self._trained: dict[int, list[int]] = {}  # uncommitted samples by epoch; used in tests
        self._start = 0  # index in the epoch's order at which this partition starts
        self._dealt_to: tuple[int, int, int] | None = None
        self._order: torch.Tensor | None = None
        self._order_of: tuple[int, int, int] | None = None
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with its own order and no progress.

        Call this method at the end of each epoch. At the start of a loop, the call would discard the progress.

        Args:
            epoch: number of the epoch, from 0. It determines the order, together with the seed.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has finished one batch of ``batch_size`` samples.

        The last batch of a partition may be smaller than the loader's batch size. In this case, pass either size.

        Args:
            batch_idx: ignored, kept for scripts written for Horovod.
            batch_size: number of samples in the batch of one rank.

        Raises:
            Invalid: ``batch_size`` is less than 1.
        """
        size = operator.index(batch_size)
        if size <= 0:
            raise Invalid(f"batch_size is {batch_size}: pass the number of samples in the batch")
        if self._noting:
            done = (self.processed_num - self._start) // self.num_replicas
            mine = self._indices()[done : done + size]
            self._trained.setdefault(self.epoch, []).extend(mine)
        # The reported count can exceed the remaining samples: the last round may contain repeats, and the last batch
        # may be smaller than ``batch_size``.
        self.processed_num = min(self.processed_num + size * self.num_replicas, len(self.dataset))

    def take_trained(self) -> list[tuple[int, list[int]]]:
        """Return the IDs of samples that this rank has finished since the last call, by epoch. For tests."""
        trained, self._trained = self._trained, {}
        return sorted(trained.items())

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore epoch and progress, and divide the remaining samples among the ranks of the current world.

        Args:
            state_dict: result of `state_dict` on any rank.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = min(state_dict["processed_num"], len(self.dataset))
        self._trained = {}  # Uncommitted samples are trained again, on any rank.
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the workers of the current world."""
        self._dealt_to = rank, size, _ = present_world()
        self.rank, self.num_replicas = rank, size
        self._start = self.processed_num
        left = len(self.dataset) - self._start
        self.num_samples = -(-left // size)
        self.total_size = self.num_samples * size

    @property
    def remaining_indices(self) -> list[int]:
        remaining: list[int] = self._epoch_order()[self._start :].tolist()
        return remaining

    def __iter__(self) -> Iterator[int]:
        self._follow_world()
        return iter(self._indices())

    def _indices(self) -> list[int]:
        rounds = torch.arange(self.num_samples, dtype=torch.int64, device="cpu")
        positions = self._start + rounds * self.num_replicas + self.rank
        # The last round is filled from the start of the epoch's order, repeatedly if necessary.
        whole = self._epoch_order()
        indices: list[int] = whole[positions % len(whole)].tolist()
        return indices

    def __len__(self) -> int:
        self._follow_world()
        return self.num_samples

    def _follow_world(self) -> None:
        # A partition of an earlier world would repeat some samples and omit others.
        if self._dealt_to != present_world():
            self.reset()

    def _epoch_order(self) -> torch.Tensor:
        """Return the order of the epoch as int64 of shape ``[samples]``.

        The order is cached, because every recovery needs it again.
        """
        of = (len(self.dataset), self.epoch, self.seed)
        if self._order is None or self._order_of != of:
            self._order = (
                sample_order.shuffled(of[0], self.seed, self.epoch)
                if self.shuffle
                else sample_order.sequential(of[0])
            )
            self._order_of = of
        return self._order


def present_world() -> tuple[int, int, int]:
    """Return rank, size and generation of the current world."""
    found = lifecycle.position()
    if found is None:
        return 0, 1, 0
    place, generation = found
    return place.rank, max(place.size, 1), generation
