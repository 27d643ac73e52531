"""Anonymous memory that other processes can map, through libc, since Python's ``mmap`` is not sufficient.

Python's ``mmap`` keeps a second descriptor for each mapping, does not return the address, and cannot replace a mapping.
Every function raises OSError if a system call fails.
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
# Linux constants, which Python lacks if it was built with old kernel headers.
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
    """Return a descriptor of ``size`` bytes of zeros, without allocated pages.

    The memory is freed with its last descriptor and mapping, even if the processes crash. ``name`` is for display in
    /proc only.
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
    """Map a memory descriptor of ``size`` bytes, and return the address.

    Pages are allocated when first touched. They are excluded from core dumps, because writing a dump would touch all of
    them.
    """
    address = _map(0, size, mmap.MAP_SHARED | _MAP_NORESERVE, fd)
    with contextlib.suppress(OSError):
        _checked(_libc.madvise(address, size, _MADV_DONTDUMP))
    return address


def unmap(address: int, size: int) -> None:
    _checked(_libc.munmap(address, size))


def make_private(fd: int, address: int, size: int) -> None:
    """Make a range of shared memory private in a forked child.

    The range keeps its contents, and writes by the child are not shared.
    """
    try:
        _map(address, size, mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED, fd)
    except OSError:
        # A write by the child fails instead of changing the parent's gradients.
        _checked(_libc.mprotect(address, size, mmap.PROT_READ))


def give_back(address: int, size: int) -> None:
    """Return the pages of a range of a shared mapping to the system, for all processes.

    The range reads as zero afterwards.
    """
    try:
        _checked(_libc.madvise(address, size, _MADV_REMOVE))
    except OSError:  # The kernel does not support MADV_REMOVE for memfd.
        ctypes.memset(address, 0, size)


def populate(address: int, size: int) -> None:
    """Allocate all pages in a range of a mapping for writing."""
    _checked(_libc.madvise(address, size, _MADV_POPULATE_WRITE))


def huge(address: int, size: int) -> None:
    """Request huge pages for untouched memory. Allocating and freeing them takes a tenth of the time of normal pages.

    This function has no effect if the kernel does not support huge pages.
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
