"""The size of the tensors that this process's collectives take, while a script is checked; broadcasts do not count."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

SPARSE = sys.maxsize  # stands for a sparse gradient, of which only some rows travel

largest: int | None = None  # elements of the largest one; None: not observed


def observe() -> None:
    """From now on, starting at 0."""
    global largest
    largest = 0


def stop() -> None:
    global largest
    largest = None


def took(tensors: Iterable[torch.Tensor]) -> None:
    """A collective takes these."""
    if largest is not None:
        took_elements(max((each.numel() for each in tensors), default=0))


def took_elements(elements: int) -> None:
    """A collective takes a tensor of so many elements."""
    global largest
    if largest is not None and elements > largest:
        largest = elements
