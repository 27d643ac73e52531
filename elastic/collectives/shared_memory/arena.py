"""Memory of this process that the other ranks of its host can map: one range for tensors and staging.

Any rank of the host can reduce a gradient bucket in this memory in place. The range is as large as the machine's
memory, but only touched pages are allocated, so it never needs to grow and a peer maps it only once. The memory is
anonymous: it is freed after a crash and independent of the size of /dev/shm.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import math
import os
import threading
import weakref

import torch

from elastic.collectives.shared_memory import memfd
from elastic.collectives.shared_memory.allocator import Allocator
from elastic.rendezvous import worker_settings

# Maximum size of an arena, so that the arenas of 64 ranks fit into the address space of one process.
_MOST_BYTES = 1 << 40

OFF = "ELASTIC_NATIVE is 0"

_WHAT_TO_DO = {
    errno.EFBIG: "the limit on the size of files (`ulimit -f`) is too low: set it to unlimited",
    errno.ENOMEM: "the limit on virtual memory (`ulimit -v`) is too low: set it to unlimited",
    errno.EMFILE: "the limit on open files (`ulimit -n`) is reached: raise it",
    errno.ENFILE: "the system has no more open files: raise fs.file-max",
    errno.ENOSYS: "the system has no memfd_create: Linux 3.17 or later is required, and a sandbox that allows it",
    errno.EPERM: "a sandbox forbids memfd_create: allow it, as Docker's default seccomp profile does",
    errno.EACCES: "a sandbox forbids memfd_create: allow it, as Docker's default seccomp profile does",
}


class Region:
    """Pages of an arena, initially zero. They remain allocated until `release`."""

    def __init__(self, arena: Arena, offset: int, size: int) -> None:
        self._arena = arena
        self.offset = offset
        self.address = arena.address + offset
        self.bytes = size
        self._released = False

    def release(self) -> None:
        """Free the region. Idempotent. No process may write to it afterwards."""
        if not self._released:
            self._released = True
            self._arena._free(self.offset, self.bytes)


class Arena:
    """Memory of this process that other ranks of its host can map. See `mine`. Thread-safe.

    Raises:
        OSError: the system cannot provide the memory.
    """

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.fd = memfd.create("elastic-arena", size)
        try:
            self.inode = os.fstat(self.fd).st_ino
            self.address = memfd.map_shared(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._regions = Allocator(size, memfd.PAGE)
        # The garbage collector may free a tensor at any point in any thread, even in the one that holds the lock. The
        # tensor's region is therefore added here without a lock and reclaimed by the next allocation.
        self._dead: collections.deque[int] = collections.deque()
        self._held_back: set[int] = set()

    def take(self, size: int) -> Region | None:
        """Allocate ``size`` bytes, aligned to pages. Return None if the arena is full."""
        with self._lock:
            self._bury()
            offset = self._regions.allocate(size)
            return None if offset is None else Region(self, offset, self._regions.size_of(offset))

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a flat tensor of zeros, or None if the arena is full. Its region is freed with its last view."""
        region = self.take(elements * dtype.itemsize)
        if region is None:
            return None
        # This object is referenced only by the tensor's storage, and is freed with it.
        held = (ctypes.c_char * region.bytes).from_address(region.address)
        weakref.finalize(held, self._die, region).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=elements)

    def _die(self, region: Region) -> None:
        if region.offset not in self._held_back:
            region.release()

    def touch(self, size: int) -> None:
        """Allocate the pages of the next tensors in advance. ``size`` is their total size in bytes."""
        region = self.take(size)
        if region is not None:
            with contextlib.suppress(OSError):  # Kernels before 5.14 do not support this.
                memfd.populate(region.address, region.bytes)
            # The pages remain allocated until the region is reclaimed.
            self._dead.append(region.offset)

    def quarantine(self, tensor: torch.Tensor) -> bool:
        """Ensure that the region of the tensor is never reused.

        This method is used if a peer that could not be stopped may still write to the region.

        Returns:
            Whether the tensor is in this arena.
        """
        offset = self.offset_of(tensor.data_ptr(), tensor.nbytes)
        with self._lock:
            start = None if offset is None else self._regions.around(offset)
            if start is None:
                return False
            self._held_back.add(start)
            return True

    def offset_of(self, address: int, size: int) -> int | None:
        """Return the offset of a memory range in this arena, or None unless the arena contains the whole range."""
        offset = address - self.address
        return offset if offset >= 0 and offset + size <= self.bytes else None

    @property
    def lent(self) -> int:
        """Return the number of bytes that are currently allocated to tensors and groups."""
        with self._lock:
            self._bury()
            return self._regions.lent

    def _free(self, offset: int, size: int) -> None:
        if os.getpid() != self._pid:  # The parent process still uses the descriptor.
            return
        memfd.give_back(self.address + offset, size)
        self._dead.append(offset)

    def _bury(self) -> None:
        while self._dead:
            self._regions.free(self._dead.popleft())

    def leave_to_parent(self) -> None:
        """Make the memory private in a forked child.

        Tensors keep their values, and writes by the child are not shared.
        """
        reach = self._regions.reach
        # If the descriptor was closed, the pages remain shared.
        with contextlib.suppress(OSError):
            if os.fstat(self.fd).st_ino == self.inode:
                if reach:
                    memfd.make_private(self.fd, self.address, reach)
                os.close(self.fd)


_mine: Arena | None = None
_why_not = ""
_making = threading.Lock()
_watching_forks = False


def mine() -> Arena | None:
    """Return this process's arena, created at the first call. Return None if the arena is unavailable, see `why_not`.

    A forked child does not share the arena of its parent.
    """
    if _mine is None and not _why_not:
        with _making:
            _make()
    return _mine


def _make() -> None:
    global _mine, _why_not, _watching_forks
    if _mine is not None or _why_not:  # Another thread has already created the arena.
        return
    if not worker_settings.native():
        _why_not = OFF
        return
    size = min(os.sysconf("SC_PHYS_PAGES") * memfd.PAGE, _MOST_BYTES)
    try:
        _mine = Arena(size)
    except OSError as error:
        _why_not = _sentence(size, error)
        return
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_forked)


def why_not() -> str:
    """Return the reason why `mine` returns None, with the remedy, or an empty string if the arena is available."""
    return _why_not


def zeros(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of zeros on the CPU, in the arena if it has room."""
    arena = mine() if elements > 0 else None
    tensor = None if arena is None else arena.tensor(elements, dtype)
    return torch.zeros(elements, dtype=dtype, device="cpu") if tensor is None else tensor


def _sentence(size: int, error: OSError) -> str:
    return f"{math.ceil(size / 2**30)} GiB of shared memory can't be mapped: {what_to_do(error)}"


def what_to_do(error: OSError) -> str:
    """Return a user message with the cause and the remedy of a failure to create or map this process's memory."""
    return _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))


def _forked() -> None:
    global _mine, _why_not, _making
    arena, _mine, _why_not, _making = _mine, None, "", threading.Lock()
    if arena is not None:
        arena.leave_to_parent()
