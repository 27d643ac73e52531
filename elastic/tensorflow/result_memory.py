"""Reused memory for the results of reductions, which TensorFlow accesses without a copy.

Gradients are reduced into this memory and returned to TensorFlow as views. TensorFlow releases the views after the
step, so the next step reuses the pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from elastic.collectives.interface import ALONE_BYTES
from elastic.collectives.shared_memory.reused_memory import ReusedMemory

ALIGNED = 64  # alignment in bytes; TensorFlow copies unaligned arrays

_memory = ReusedMemory()


def pays(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are large enough for reused memory.

    Small ones are faster in newly allocated memory.
    """
    return sum(tensor.nbytes for tensor in tensors) >= ALONE_BYTES


def _order(tensor: torch.Tensor) -> tuple[str, bool, int]:
    """Sort key that puts sizes that are not a multiple of the alignment last, since they misalign later tensors."""
    return str(tensor.dtype), tensor.nbytes < ALONE_BYTES, tensor.nbytes % ALIGNED


def made(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Allocate a result for each tensor, contiguous by dtype. Tensors that are too large for fusion come first.

    Returns the order of the tensors, which depends only on shapes and dtypes, and the memory in that order.
    """
    places = sorted(range(len(tensors)), key=lambda at: _order(tensors[at]))
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    left = {dtype: _memory.tensor(count, dtype) for dtype, count in elements.items()}
    found = []
    for at in places:
        tensor = tensors[at]
        count = math.prod(tensor.shape)
        found.append(left[tensor.dtype][:count].view(tensor.shape))
        left[tensor.dtype] = left[tensor.dtype][count:]
    return places, found
