"""A lock that a worker holds in memory that it shares with its agent, and that the kernel lets go as the worker dies.

The kernel takes a dead process's memory apart first, which may take long, and only then closes its sockets and tells
whoever waits for its end. Its robust locks it lets go before all that. See set_robust_list(2).

Acts. Where the system or the C library can't do it nobody hears of a death in this way, and it is seen as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import platform
import threading
from collections.abc import Callable

LIFE_LOCK = "ELASTIC_LIFE_LOCK"  # in a worker's environment: a file of the agent, and where in it

_NAME = "elastic-life-locks"
_BYTES = 128  # for each; a pthread_mutex_t of glibc has 40 or 48, and begins with the word that the kernel knows
_MOST = 1024  # workers of one agent that are watched at a time
_WAITERS, _OWNER_DIED = 1 << 31, 1 << 30
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FAILED = ctypes.c_void_p(-1).value
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # the system call; 0: not known

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_held = False  # by this process, to its end


def hold(told: str) -> None:
    """In a worker, whose variable says ``told``. Only its main thread lives as long as the process."""
    global _held
    if not told or _held or threading.current_thread() is not threading.main_thread():
        return
    with contextlib.suppress(OSError, ValueError):
        file, _, offset = told.rpartition(":")
        if not os.readlink(file).startswith(f"/memfd:{_NAME}"):
            return  # of an agent that is gone, whose number another process has
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        memory = _mapped(fd)
        os.close(fd)
        _held = memory is not None and _lock(memory + int(offset))


def _mapped(fd: int) -> int | None:
    """The address. Never unmapped: the kernel looks there last of all, and a thread may. Python's own mmap would be, as
    the interpreter ends, and keeps a descriptor.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, _BYTES * _MOST, access, mmap.MAP_SHARED, fd, 0)
    return None if address == _FAILED else int(address)


def _lock(address: int) -> bool:
    mutex, kind = ctypes.c_void_p(address), ctypes.create_string_buffer(64)
    word = ctypes.c_uint32.from_address(address)
    if word.value:
        return False  # the worker does, and this process is a child of it
    locked = (
        _libc.pthread_mutexattr_init(kind) == 0
        and _libc.pthread_mutexattr_setpshared(kind, 1) == 0
        and _libc.pthread_mutexattr_setrobust(kind, 1) == 0
        and _libc.pthread_mutex_init(mutex, kind) == 0
        and _libc.pthread_mutex_trylock(mutex) == 0  # a second process of one worker has none
        and word.value == threading.get_native_id()  # as glibc has it
    )
    if locked:
        word.value |= _WAITERS  # else the kernel wakes nobody
    return locked


class LifeLocks:
    """Those of one agent's workers, in one piece of memory, which the workers open through /proc."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._memory: int | None = None
        self._free = list(range(0, _BYTES * _MOST, _BYTES))
        if _FUTEX and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):
                self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                os.ftruncate(self._fd, _BYTES * _MOST)
                self._memory = _mapped(self._fd)

    def new(self) -> LifeLock | None:
        """For a worker that is about to start."""
        if self._fd is None or self._memory is None or not self._free:
            return None
        offset = self._free.pop()
        address = self._memory + offset
        ctypes.memset(address, 0, _BYTES)
        told = f"/proc/{os.getpid()}/fd/{self._fd}:{offset}"
        return LifeLock(told, address, lambda: self._free.append(offset))

    def close(self) -> None:
        """No more workers are started."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LifeLock:
    """One worker's. ``told`` is for its environment."""

    def __init__(self, told: str, address: int, free: Callable[[], None]) -> None:
        self.told = told
        self._address = address
        self._free = free
        self._left = itertools.count(1)
        self._ended = False

    def watch(self, gone: Callable[[], None]) -> None:
        """Has ``gone`` called, in a thread of its own, when the thread that held it has ended. Not after `end`."""
        self._left = itertools.count()  # by the agent, and by that thread
        watching = threading.Thread(target=self._wait, args=(gone,), daemon=True)
        try:
            watching.start()
        except RuntimeError:  # no thread can be had: its exit will tell
            self._left = itertools.count(1)

    def end(self) -> None:
        """The process is gone, whether it ever held the lock or not."""
        self._ended = True
        ctypes.c_uint32.from_address(self._address).value = _OWNER_DIED
        self._futex(_FUTEX_WAKE, 1)
        self._leave()

    def _wait(self, gone: Callable[[], None]) -> None:
        word = ctypes.c_uint32.from_address(self._address)
        while not (value := word.value) & _OWNER_DIED:
            if not self._futex(_FUTEX_WAIT, value):  # a sandbox forbids it
                return self._leave()
        if not self._ended:
            gone()
        self._leave()

    def _leave(self) -> None:
        """Who is the second to leave frees the place: nobody looks at it any more."""
        if next(self._left):
            self._free()

    def _futex(self, what: int, value: int) -> bool:
        nothing = ctypes.c_void_p()
        address, wanted = ctypes.c_void_p(self._address), ctypes.c_uint32(value)
        done = _libc.syscall(_FUTEX, address, what, wanted, nothing, nothing, 0)
        return done >= 0 or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR)
