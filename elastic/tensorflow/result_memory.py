"""Where reductions leave what TensorFlow takes as it is, without a copy: in the arena, in memory that is used again.

TensorFlow's gradients are copied there, reduced in place, and handed back as tensors over the same memory. TensorFlow
lets go of them when the step has used them, and the next step finds their pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.collectives.shared_memory.reused_memory import ReusedMemory

LARGE = 1 << 20  # bytes of one call: less is faster in memory that is new each time
ALIGNED = 64  # bytes: TensorFlow copies an array that does not start at a multiple of it

_memory = ReusedMemory()


def pays(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are so large that they should travel there."""
    return sum(tensor.nbytes for tensor in tensors) >= LARGE


def copied(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Copies, those of one dtype in one piece; and of which of the tensors each is one. The order depends on shapes and
    dtypes, and on nothing else.
    """
    # The others come last: each moves those after it off the multiple.
    places = sorted(
        range(len(tensors)), key=lambda at: (str(tensors[at].dtype), tensors[at].nbytes % ALIGNED)
    )
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    left = {dtype: _memory.tensor(count, dtype) for dtype, count in elements.items()}
    made = []
    for at in places:
        tensor = tensors[at]
        count = math.prod(tensor.shape)
        made.append(left[tensor.dtype][:count].view(tensor.shape))
        left[tensor.dtype] = left[tensor.dtype][count:]
    sources = [tensors[at] for at in places]
    HostCopy(sources, made).run(sources, [tensor.data_ptr() for tensor in sources])
    return places, made
