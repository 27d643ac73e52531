"""Order of the samples in an epoch, the same in every process and world."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic.data.seeds import seed_of
from elastic.errors import Invalid


def shuffled(length: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the permutation that torch's ``DistributedSampler`` uses for a seed and epoch.

    The permutation is int64, of shape ``[length]``.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator, dtype=torch.int64, device="cpu")


def sequential(length: int) -> torch.Tensor:
    """Return the order 0, 1, ..., as int64 of shape ``[length]``."""
    return torch.arange(length, dtype=torch.int64, device="cpu")


class EpochOrder:
    """Cache of the current epoch's order, which every recovery needs again."""

    def __init__(self, draw: Callable[[int, int], Any]) -> None:
        # function of length and epoch that returns the order as a sliceable object
        self._draw = draw
        self._of: tuple[int, int] | None = None
        self._order: Any = None

    def of(self, length: int, epoch: int) -> Any:
        """Return the order of an epoch.

        The order is an int64 array of shape ``[length]``, or a list of the values that a sampler has drawn.
        """
        if self._of != (length, epoch):
            self._order, self._of = self._draw(length, epoch), (length, epoch)
        return self._order


def permutation(shuffle: bool, seed: int) -> EpochOrder:
    """Return an order in which each sample occurs once, optionally shuffled with ``seed``."""
    # Slicing a numpy array is much faster than slicing a tensor.
    return EpochOrder(
        lambda length, epoch: (
            shuffled(length, seed, epoch) if shuffle else sequential(length)
        ).numpy()
    )


def drawn_by(sampler: Iterable[Any], seed: int, what: str) -> EpochOrder:
    """Return the order that a sampler draws when seeded for an epoch: indices, or lists of indices.

    Raises Invalid if the sampler draws different values each time, because the ranks would use different orders.
    """

    def draw(length: int, epoch: int) -> Sequence[Any]:
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with seeded(seed_of("order", seed, epoch)):
            return list(sampler)

    if draw(0, 0) != draw(0, 0):
        raise Invalid(
            f"{what} {type(sampler).__name__} returns different indices on repeated calls with the same seeds of"
            " torch, random and numpy, so ranks could not use the same order: create the sampler without its"
            " own generator, or seed the generator in set_epoch()"
        )
    return EpochOrder(draw)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds this process's random generators: torch (CPU), random and numpy.

    The generators are restored at the end of the block.
    """
    with kept():
        plant(seed)
        yield


@contextmanager
def kept() -> Iterator[None]:
    """Context manager that restores this process's random generators at the end of the block.

    These are the generators of torch (CPU), random and numpy.
    """
    numpy = sys.modules.get("numpy")
    saved = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        if numpy is not None and saved[2] is not None:
            numpy.random.set_state(saved[2])


def plant(seed: int) -> None:
    """Seed this process's generators of torch (CPU), random and numpy."""
    # torch.manual_seed() would also seed the GPUs, which do not load samples.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
