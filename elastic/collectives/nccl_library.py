"""Calls of NCCL that torch has no word for, on communicators that torch made. Acts.

`revoke` ends the kernels of a communicator and frees nothing: its memory may still be read by kernels of its peers.
NCCL has it since 2.28. The functions are looked up in the library that torch itself is linked with.
"""

from __future__ import annotations

import ctypes
import functools
import os

_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t
_DEFAULT = 0  # NCCL_REVOKE_DEFAULT


@functools.cache
def _linked() -> ctypes.CDLL | None:
    """Torch's CUDA library: a name that is looked up there is found in the NCCL that it was linked with, or in one that
    was preloaded in its place.
    """
    try:
        return ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


@functools.cache
def _function(name: str, *argtypes: type) -> ctypes._NamedFuncPointer | None:
    library = _linked()
    try:
        function = getattr(library, name)
    except AttributeError:
        return None
    function.argtypes, function.restype = argtypes, ctypes.c_int
    return function  # type: ignore[no-any-return]


def can_revoke() -> bool:
    """Whether this NCCL has `revoke`."""
    return _function("ncclCommRevoke", ctypes.c_void_p, ctypes.c_int) is not None


def revoke(communicator: int) -> int:
    """Begins to end all kernels of a communicator, at once and for good. Waits for nobody, and needs no GPU.

    Returns NCCL's error, 0 for none. ``communicator``: as ``_comm_ptr()`` gives it; it must not be freed yet.
    """
    function = _function("ncclCommRevoke", ctypes.c_void_p, ctypes.c_int)
    assert function is not None, "call can_revoke() before"
    return _error(function(communicator, _DEFAULT))


def reported(communicator: int) -> int:
    """The error that NCCL has noticed on a communicator by itself, 0 for none. Never call it while another thread
    launches a collective there.
    """
    function = _function("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    state = ctypes.c_int(_SUCCESS)
    assert function is not None, "every NCCL has it"
    return _error(function(communicator, ctypes.byref(state)) or state.value)


def _error(result: int) -> int:
    return 0 if result == _IN_PROGRESS else result


def words(error: int) -> str:
    """NCCL's own, for an error."""
    library = _linked()
    assert library is not None, "there is no error without NCCL"
    library.ncclGetErrorString.restype = ctypes.c_char_p
    text: bytes = library.ncclGetErrorString(error)
    return text.decode()
