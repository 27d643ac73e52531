"""Sums of host tensors in one pass, by the C++ library's reduction kernels.

torch reads and writes memory once for each addition. Memory accesses dominate the cost, because gradients are larger
than the caches. Elements are added in the order of the tensors and rounded after each addition, so the result is
bitwise equal to torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from elastic.collectives.dtypes_and_ops import DType
from elastic.collectives.shared_memory import host_copy, native_library

# Not half precision: the library would round the whole sum once instead of after each addition.
_DTYPES = {torch.float32: DType.FLOAT32, torch.float64: DType.FLOAT64}
_SUM = 1  # code of the operation SUM in native/kernels.h


def may(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `add_up` supports the device and the dtype of a tensor."""
    return device.type == "cpu" and dtype in _DTYPES and native_library.load() is not None


def add_up(sources: Sequence[torch.Tensor], into: torch.Tensor, divisor: int) -> bool:
    """Set ``into``, which may be one of the sources, to ``((sources[0] + sources[1]) + sources[2] + ...) / divisor``.

    The tensors have one shape and a dtype that `may` supports.

    Returns:
        False if the sum was not computed: the tensors' layouts differ, or torch computes in several threads, which have
            more memory bandwidth.
    """
    library = native_library.load()
    if library is None or torch.get_num_threads() > 1 or len(sources) > native_library.MAX_RANKS:
        return False
    if not all(host_copy.bytewise(each, into) for each in sources):
        return False
    count = len(sources)
    pointers = (ctypes.c_void_p * count)(*[each.data_ptr() for each in sources])
    target = (ctypes.c_void_p * 1)(into.data_ptr())
    done: int = library.elastic_reduce(
        None, _DTYPES[into.dtype], _SUM, target, 1, pointers, count, into.numel(), 1.0, divisor
    )
    return done == 0
