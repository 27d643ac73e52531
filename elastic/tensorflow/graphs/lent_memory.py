"""Memory of torch tensors that TensorFlow uses without a copy.

When TensorFlow releases a tensor, it calls a deallocator, which sets a flag. This can happen in any thread and even
after the Python interpreter has exited. Therefore the deallocator is in the C++ library, and only the tensors are
freed, never the flags.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from elastic.collectives.shared_memory import native_library

LARGE = 1 << 20  # bytes: smaller tensors are copied
ALIGNED = 64  # alignment in bytes; TensorFlow copies unaligned memory
_FLAGS = 4096  # maximum number of tensors lent at once

_Flags = ctypes.c_uint8 * _FLAGS


class LentMemory:
    """Pool of tensors lent to TensorFlow. Thread-safe. Each process has one pool."""

    def __init__(self) -> None:
        lib = native_library.load()
        # address of the deallocator to pass to TensorFlow; None without the C++ library
        self.let_go: int | None = None
        if lib is not None:
            self.let_go = ctypes.cast(lib.elastic_let_go, ctypes.c_void_p).value
        self._lock = threading.Lock()
        self._flags = _Flags()
        self._free = list(range(_FLAGS))
        self._lent: dict[int, torch.Tensor] = {}
        # never freed, because TensorFlow may use them after the interpreter has exited
        for kept in (self._flags, self._lent):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def lend(self, tensor: torch.Tensor) -> int | None:
        """Lend a tensor. Return the address of its flag, to pass to `let_go`, or None if it must be copied instead."""
        if not self.let_go or tensor.nbytes < LARGE or tensor.data_ptr() % ALIGNED:
            return None
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
            self._flags[number] = 0
            self._lent[number] = tensor
        return ctypes.addressof(self._flags) + number

    def collect(self) -> None:
        """Drop the tensors that TensorFlow has released."""
        if not self._lent:
            return
        with self._lock:
            over = [number for number in self._lent if self._flags[number]]
            dropped = [self._lent.pop(number) for number in over]
            self._free += over
        del dropped  # outside the lock: dropping a tensor may run arbitrary code
