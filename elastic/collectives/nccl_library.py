"""NCCL functions that torch does not expose, for communicators that torch created.

`revoke` ends the kernels of a communicator without freeing its memory, which kernels of its peers may still read. NCCL
supports this since version 2.28. The functions are looked up in the library that torch is linked with.
"""

from __future__ import annotations

import ctypes
import functools
import os

_SUCCESS, _IN_PROGRESS = 0, 7  # values of ncclResult_t
_DEFAULT = 0  # value of NCCL_REVOKE_DEFAULT


@functools.cache
def _linked() -> ctypes.CDLL | None:
    """Return torch's CUDA library. Its symbols resolve to the NCCL library that it uses, linked or preloaded."""
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
    """Return whether this version of NCCL has `revoke`."""
    return _function("ncclCommRevoke", ctypes.c_void_p, ctypes.c_int) is not None


def revoke(communicator: int) -> int:
    """Revoke a communicator permanently: its kernels end, and no memory is freed.

    This function does not wait, and needs no GPU.

    Args:
        communicator: communicator from ``_comm_ptr()``, not freed yet.

    Returns:
        NCCL's error code, 0 for none.
    """
    function = _function("ncclCommRevoke", ctypes.c_void_p, ctypes.c_int)
    assert function is not None, "call can_revoke() first"
    return _error(function(communicator, _DEFAULT))


def reported(communicator: int) -> int:
    """Return the code of the error that NCCL has detected on a communicator, or 0.

    This function must not be called while another thread launches a collective on the communicator.
    """
    function = _function("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    state = ctypes.c_int(_SUCCESS)
    assert function is not None, "every NCCL has it"
    return _error(function(communicator, ctypes.byref(state)) or state.value)


def _error(result: int) -> int:
    return 0 if result == _IN_PROGRESS else result


def words(error: int) -> str:
    """Return NCCL's description of an error code."""
    library = _linked()
    assert library is not None, "NCCL is not loaded, so it returned no error"
    library.ncclGetErrorString.restype = ctypes.c_char_p
    text: bytes = library.ncclGetErrorString(error)
    return text.decode()
