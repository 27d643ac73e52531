"""Record of the sizes of tensors in this process's collectives, except broadcasts, while a script is checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import torch

SPARSE = sys.maxsize  # marks a sparse gradient, of which only some rows are sent

shapes: set[tuple[int, ...]] = set()  # shapes of all tensors that were observed
largest: int | None = None  # number of elements of the largest tensor, or None if none was observed


def observe() -> None:
    """Start recording the sizes of tensors in collectives."""
    global largest
    largest = 0
    shapes.clear()


def stop() -> None:
    global largest
    largest = None
    shapes.clear()


def took(tensors: Iterable[torch.Tensor]) -> None:
    """Record the sizes of the tensors of a collective."""
    if largest is not None:
        taken = [tuple(each.shape) for each in tensors]
        shapes.update(taken)
        took_elements(max(map(math.prod, taken), default=0))


def took_elements(elements: int) -> None:
    """Record a tensor of a collective by its number of elements."""
    global largest
    if largest is not None and elements > largest:
        largest = elements
