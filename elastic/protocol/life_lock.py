"""Immediate detection of a worker's death, through a robust lock in memory that the worker shares with its agent.

When a process dies, the kernel releases its robust locks first. Then it frees the memory, which may take long, and only
afterwards closes the sockets and notifies the parent. See set_robust_list(2). The lock therefore detects a death
earlier than the process's exit status. If the system or the C library does not support such locks, the exit status is
used.
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

# environment variable that gives a worker the path of the agent's memory file and the offset of its lock
LIFE_LOCK = "ELASTIC_LIFE_LOCK"

_NAME = "elastic-life-locks"
# Size of a lock in bytes. glibc's pthread_mutex_t has 40 or 48 bytes and begins with the word that the kernel uses.
_BYTES = 128
_MOST = 1024  # maximum number of workers that one agent watches at the same time
_WAITERS, _OWNER_DIED = 1 << 31, 1 << 30
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FAILED = ctypes.c_void_p(-1).value
# number of the futex system call, or 0 if unknown
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_held = False  # whether this process has taken its lock, which it holds until it exits


def hold(location: str) -> None:
    """Take the lock at ``location``, the value of the environment variable ELASTIC_LIFE_LOCK.

    This function does nothing in a thread other than the main one, because the lock must be held until the process
    exits.
    """
    global _held
    if not location or _held or threading.current_thread() is not threading.main_thread():
        return
    with contextlib.suppress(OSError, ValueError):
        file, _, offset = location.rpartition(":")
        if not os.readlink(file).startswith(f"/memfd:{_NAME}"):
            return  # The agent has exited, and another process has its process ID.
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        memory = _mapped(fd)
        os.close(fd)
        _held = memory is not None and _lock(memory + int(offset))


def _mapped(fd: int) -> int | None:
    """Map the memory file. Return its address, or None on failure.

    The memory is never unmapped, because the kernel reads it last when the process exits. Python's own mmap is not
    used: it is unmapped at interpreter exit, and keeps a file descriptor.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, _BYTES * _MOST, access, mmap.MAP_SHARED, fd, 0)
    return None if address == _FAILED else int(address)


def _lock(address: int) -> bool:
    mutex, kind = ctypes.c_void_p(address), ctypes.create_string_buffer(64)
    word = ctypes.c_uint32.from_address(address)
    if word.value:
        return False  # This process is a child of the worker, which already holds the lock.
    locked = (
        _libc.pthread_mutexattr_init(kind) == 0
        and _libc.pthread_mutexattr_setpshared(kind, 1) == 0
        and _libc.pthread_mutexattr_setrobust(kind, 1) == 0
        and _libc.pthread_mutex_init(mutex, kind) == 0
        # The call fails in a second process of the same worker, because the first process holds the lock.
        and _libc.pthread_mutex_trylock(mutex) == 0
        and word.value == threading.get_native_id()  # layout of glibc's pthread_mutex_t
    )
    if locked:
        # Without this bit, the kernel would not wake threads that wait for the lock.
        word.value |= _WAITERS
    return locked


class LifeLocks:
    """Locks of one agent's workers, in one memory file. Workers open the file through /proc."""

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
        """Return a new lock for a worker that is about to start, or None if the system does not support such locks."""
        if self._fd is None or self._memory is None or not self._free:
            return None
        offset = self._free.pop()
        address = self._memory + offset
        ctypes.memset(address, 0, _BYTES)
        location = f"/proc/{os.getpid()}/fd/{self._fd}:{offset}"
        return LifeLock(location, address, lambda: self._free.append(offset))

    def close(self) -> None:
        """Close the memory file. No more workers can be started."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LifeLock:
    """Lock of one worker. ``env_value`` is the value for the worker's variable ELASTIC_LIFE_LOCK."""

    def __init__(self, env_value: str, address: int, free: Callable[[], None]) -> None:
        self.env_value = env_value
        self._address = address
        self._free = free
        self._left = itertools.count(1)
        self._ended = False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` in a new thread when the lock's owner has died. This method must not be called after `end`."""
        # number of `_leave` calls so far: one each by the agent and the watching thread
        self._left = itertools.count()
        watching = threading.Thread(target=self._wait, args=(gone,), daemon=True)
        try:
            watching.start()
        # No thread could be started, so the exit of the process is detected instead.
        except RuntimeError:
            self._left = itertools.count(1)

    def end(self) -> None:
        """Wake the watching thread after the process has exited, in case the process never held the lock."""
        self._ended = True
        ctypes.c_uint32.from_address(self._address).value = _OWNER_DIED
        self._futex(_FUTEX_WAKE, 1)
        self._leave()

    def _wait(self, gone: Callable[[], None]) -> None:
        word = ctypes.c_uint32.from_address(self._address)
        while not (value := word.value) & _OWNER_DIED:
            if not self._futex(_FUTEX_WAIT, value):  # fails if a sandbox forbids the system call
                return self._leave()
        if not self._ended:
            gone()
        self._leave()

    def _leave(self) -> None:
        """Free the lock's memory at the second call: then neither the agent nor the watching thread uses it."""
        if next(self._left):
            self._free()

    def _futex(self, what: int, value: int) -> bool:
        nothing = ctypes.c_void_p()
        address, wanted = ctypes.c_void_p(self._address), ctypes.c_uint32(value)
        done = _libc.syscall(_FUTEX, address, what, wanted, nothing, nothing, 0)
        return done >= 0 or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR)
