"""Copies of host tensors into persistent buffers, for commits and large gradients.

The C++ library, if available, copies all tensors in one call with stores that bypass the caches. This is a third faster
than torch and keeps training data in the caches. torch copies tensors that cannot be copied byte by byte, and all
tensors if it has several threads, which have more memory bandwidth than one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from elastic.collectives.shared_memory import native_library

# excludes other subclasses, which may store their values elsewhere
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def bytewise(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Return whether the tensor can be copied to the buffer byte by byte.

    Both must store their values consecutively and in order.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and buffer.is_contiguous()
        and not tensor.is_neg()
        and not tensor.dtype.is_complex  # Complex tensors may be conjugated lazily.
    )


class HostCopy:
    """Copier of tensors into fixed buffers. It can be reused for later tensors of the same layout."""

    def __init__(self, tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._library = native_library.load()
        direct = [bytewise(*pair) for pair in zip(tensors, buffers, strict=True)]
        self._all_direct = all(direct)
        self._direct = [number for number, yes in enumerate(direct) if yes]
        self._others = [number for number, yes in enumerate(direct) if not yes]
        count = len(self._direct)
        ours = [buffers[number] for number in self._direct]
        self._to = (ctypes.c_void_p * count)(*[buffer.data_ptr() for buffer in ours])
        self._bytes = (ctypes.c_uint64 * count)(*[buffer.nbytes for buffer in ours])
        self._from = (ctypes.c_void_p * count)()

    def run(self, tensors: list[torch.Tensor], pointers: list[Any]) -> None:
        """Copy the tensors into the buffers. This method blocks until the copy is complete.

        ``pointers`` are the addresses of the tensors.
        """
        if self._library is None or not self._direct or torch.get_num_threads() > 1:
            torch._foreach_copy_(self._buffers, tensors)
            return
        if not self._all_direct:
            torch._foreach_copy_(
                [self._buffers[number] for number in self._others],
                [tensors[number] for number in self._others],
            )
            pointers = [pointers[number] for number in self._direct]
        self._from[:] = pointers
        self._library.elastic_copy(self._to, self._from, self._bytes, len(pointers))
