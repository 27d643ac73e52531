"""Where reductions leave what TensorFlow takes as it is, without a copy: in the arena, in memory that is used again.

TensorFlow's gradients are reduced into it, and handed back as tensors over the same memory. TensorFlow lets go of them
when the step has used them, and the next step finds their pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from elastic.collectives.interface import ALONE_BYTES
from elastic.collectives.shared_memory.reused_memory import ReusedMemory

ALIGNED = 64  # bytes: TensorFlow copies an array that does not start at a multiple of it

_memory = ReusedMemory()


def pays(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are so large: less is faster in memory that is new each time."""
    return sum(tensor.nbytes for tensor in tensors) >= ALONE_BYTES


def _order(tensor: torch.Tensor) -> tuple[str, bool, int]:
    """What is no multiple comes after what is: it moves those after it off the multiples."""
    return str(tensor.dtype), tensor.nbytes < ALONE_BYTES, tensor.nbytes % ALIGNED


def made(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Memory like these, that of one dtype in one piece, what travels alone first; and for which of the tensors each
    is. The order depends on shapes and dtypes, and on nothing else.
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
