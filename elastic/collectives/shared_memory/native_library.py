"""Loader of the C++ library built from native/. The library file is next to this file; it is verified and loaded once.

The library is optional, so no function of this module raises an exception. Without it, tensors use Gloo even within a
host, which is slower. A truncated or partly overwritten file would crash the process when it is mapped or called, so
the build appends the file's SHA-256, and a file with another checksum is not loaded.

All functions release the GIL while they run. Pointers are passed as integers or as ctypes arrays.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

FILE = Path(__file__).with_name("libelastic_native.so")
ABI = 11  # ABI version in native/abi.cc, which changes whenever a function or struct changes.
MAX_RANKS = 64  # value of kMaxRanks in native/kernels.h

_CHECKSUM = 64  # number of hexadecimal digits at the end of the file
_BUILD = "in a checkout, run make native; otherwise, install g++ and reinstall hvd-elastic"

Library = ctypes.CDLL


class NativeOptions(ctypes.Structure):
    """Layout of the C struct `elastic_options` of native/group.h, which documents the fields."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("control", ctypes.c_void_p),
        ("arenas", ctypes.c_void_p),
        ("arena_bytes", ctypes.c_void_p),
        ("staging", ctypes.c_void_p),
        ("pidfds", ctypes.c_void_p),
        ("oversubscribed", ctypes.c_int32),
        ("timeout_s", ctypes.c_double),
    )


_i32, _i64, _u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_size = ctypes.c_size_t
_double, _text, _at = ctypes.c_double, ctypes.c_char_p, ctypes.c_void_p

# Return type and argument types, as in native/abi.cc, copy.h, file.h, kernels.h, lent.h and group.h.
FUNCTIONS = {
    "elastic_abi": (_i32, ()),
    "elastic_kernels_name": (_text, ()),
    "elastic_copy": (None, (_at, _at, _at, _i32)),
    "elastic_file_write": (_i32, (_at, _at, _u64, _at, _at)),
    "elastic_let_go": (None, (_at, _size, _at)),
    "elastic_reduce": (
        ctypes.c_int,
        (_text, _i32, _i32, _at, _i32, _at, _i32, _size, _double, _double),
    ),
    "elastic_control_bytes": (_size, (_i32,)),
    "elastic_staging_bytes": (_size, ()),
    "elastic_open": (_at, (ctypes.POINTER(NativeOptions),)),
    "elastic_allreduce": (_u64, (_at, _at, _at, _u64, _i32, _i32, _double, _double)),
    "elastic_reduce_shares": (_u64, (_at, _at, _u64, _i32, _i32, _double, _double)),
    "elastic_reduce_tree": (_u64, (_at, _at, _u64, _u64, _i32, _at, _u64, _double, _double)),
    "elastic_spread_shares": (_u64, (_at, _at, _u64, _i32)),
    "elastic_share": (None, (_u64, _i32, _i32, _i32, _at, _at)),
    "elastic_broadcast": (_u64, (_at, _at, _u64, _i32)),
    "elastic_allgather": (_u64, (_at, _at, _at, _u64)),
    "elastic_alltoall": (_u64, (_at, _at, _at, _at, _at)),
    "elastic_barrier": (_u64, (_at,)),
    "elastic_done": (_i32, (_at, _u64)),
    "elastic_wait": (_i32, (_at, _u64, _double)),
    "elastic_send": (_i32, (_at, _at, _u64, _u64, _i32, _i64, _at)),
    "elastic_receive": (_i32, (_at, _at, _u64, _u64, _i32, _i64, _at)),
    "elastic_wait_message": (_i32, (_at, _at, _double)),
    "elastic_abort": (None, (_at,)),
    "elastic_status": (_u64, (_at,)),
    "elastic_mismatch": (None, (_at, _at)),
    "elastic_missing": (_u64, (_at,)),
    "elastic_drain": (_i32, (_at, _double)),
    "elastic_close": (None, (_at,)),
    "elastic_detach": (_i32, (_at, _double)),
    "elastic_free": (None, (_at,)),
}


def load() -> Library | None:
    """Return the library, or None if it cannot be used. `missing` returns the reason."""
    return _found()[0]


def missing() -> str:
    """Return the reason why `load` returns None, with the remedy, in one line.

    The result is empty if the library can be used.
    """
    return _found()[1]


@functools.cache
def _found() -> tuple[Library | None, str]:
    return read(FILE)


def read(file: Path) -> tuple[Library | None, str]:
    """Load a library file. Return the library and an empty string, or None and the reason."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None, f"the C++ library was not built: {file} does not exist; {_BUILD}"
    except OSError as error:
        return None, f"the C++ library can't be read: {error}"
    if not _whole(content):
        return (
            None,
            f"{file} is corrupted, or not the file that was built: its checksum differs; {_BUILD}",
        )
    try:
        library = ctypes.CDLL(str(file))
        found = library.elastic_abi()
        if found == ABI:
            _declare(library)
            return library, ""
    except (OSError, AttributeError) as error:
        return None, f"the C++ library can't be loaded: {error}; {_BUILD}"
    return None, f"{file} has another version: its ABI is {found}, expected {ABI}; {_BUILD}"


def _whole(content: bytes) -> bool:
    body, checksum = content[:-_CHECKSUM], content[-_CHECKSUM:]
    return body.startswith(b"\x7fELF") and hashlib.sha256(body).hexdigest().encode() == checksum


def _declare(library: Library) -> None:
    for name, (returns, takes) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = returns
        function.argtypes = takes
