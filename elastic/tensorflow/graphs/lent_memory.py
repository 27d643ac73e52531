"""Memory of tensors that TensorFlow holds without a copy, until it has let go of them: it sets a flag, in any thread.

It may do so after Python has ended. So it calls the C++ library, and nothing here is ever freed but the tensors.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from elastic.collectives.shared_memory import native_library

LARGE = 1 << 20  # bytes: what is smaller is copied
ALIGNED = 64  # bytes: TensorFlow copies memory that does not start at a multiple of it
_FLAGS = 4096  # tensors that are lent at once, at most

_Flags = ctypes.c_uint8 * _FLAGS


class LentMemory:
    """Thread-safe. A process needs one."""

    def __init__(self) -> None:
        lib = native_library.load()
        # What TensorFlow is given as the deallocator; None without the C++ library.
        self.let_go: int | None = None
        if lib is not None:
            self.let_go = ctypes.cast(lib.elastic_let_go, ctypes.c_void_p).value
        self._lock = threading.Lock()
        self._flags = _Flags()
        self._free = list(range(_FLAGS))
        self._lent: dict[int, torch.Tensor] = {}
        for kept in (self._flags, self._lent):  # the end of the interpreter would free them
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def lend(self, tensor: torch.Tensor) -> int | None:
        """The address of the flag for `let_go`; None where this tensor has to be copied."""
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
        """Drops the tensors that TensorFlow has let go of."""
        if not self._lent:
            return
        with self._lock:
            over = [number for number in self._lent if self._flags[number]]
            dropped = [self._lent.pop(number) for number in over]
            self._free += over
        del dropped  # outside of the lock: what ends with a tensor may be anything
