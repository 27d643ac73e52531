"""Memory without a name that other processes can map: what Python's own ``mmap`` can't do, over libc.

Python's keeps a second descriptor for each mapping, tells no address, and can't change what is mapped at one. Every
call raises OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

PAGE = mmap.PAGESIZE

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Linux's numbers; Python knows them where its headers did.
_MADV_REMOVE, _MADV_DONTDUMP, _MADV_POPULATE_WRITE = 9, 16, 23
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create(name: str, size: int) -> int:
    """A descriptor of ``size`` bytes of zeros, none of which takes a page yet. Freed with its last descriptor and
    mapping, however the processes end. ``name`` is only seen in /proc.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_shared(fd: int, size: int) -> int:
    """The address. Pages are taken when they are first touched, and no core dump contains them: writing one would touch
    them all.
    """
    address = _map(0, size, mmap.MAP_SHARED | _MAP_NORESERVE, fd)
    with contextlib.suppress(OSError):
        _checked(_libc.madvise(address, size, _MADV_DONTDUMP))
    return address


def unmap(address: int, size: int) -> None:
    _checked(_libc.munmap(address, size))


def make_private(fd: int, address: int, size: int) -> None:
    """In a forked child: what it writes here from now on, nobody else sees. It still reads what is there."""
    try:
        _map(address, size, mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED, fd)
    except OSError:
        # Rather a child that ends where it writes than a parent whose gradients it changes.
        _checked(_libc.mprotect(address, size, mmap.PROT_READ))


def give_back(address: int, size: int) -> None:
    """The pages of this part of a shared mapping return to the system, for all who map it; it reads as zeros."""
    try:
        _checked(_libc.madvise(address, size, _MADV_REMOVE))
    except OSError:  # a kernel that does not know it
        ctypes.memset(address, 0, size)


def populate(address: int, size: int) -> None:
    """Has the system find all pages of this part of a mapping now, for writing."""
    _checked(_libc.madvise(address, size, _MADV_POPULATE_WRITE))


def huge(address: int, size: int) -> None:
    """Asks for huge pages where memory has not been touched yet: the system finds and frees them in a tenth of the
    time. A kernel without them does nothing.
    """
    begin = -(-address // PAGE) * PAGE
    if address + size > begin + PAGE:
        with contextlib.suppress(OSError):
            _checked(
                _libc.madvise(begin, (address + size - begin) // PAGE * PAGE, mmap.MADV_HUGEPAGE)
            )


def _map(address: int, size: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size, _READ_WRITE, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        raise _error()
    return int(mapped)


def _checked(result: int) -> None:
    if result != 0:
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
