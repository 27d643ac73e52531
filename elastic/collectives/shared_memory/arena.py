"""The memory of this process that the other ranks of its host can map: one range, made once, for tensors and staging.

A bucket of gradients that lies here is reduced where it is, by whichever rank gets to it. The range is as large as the
machine's memory, of which only the pages that were touched count, so that it never grows, and a peer maps it once. It
has no name: nothing is left behind by a crash, and the size of /dev/shm does not matter.
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
from elastic.collectives.shared_memory.allocator import Regions
from elastic.rendezvous import environment

# 64 ranks that map each other's fit into the address space of a process.
_MOST_BYTES = 1 << 40

OFF = "ELASTIC_NATIVE is 0"

_WHAT_TO_DO = {
    errno.EFBIG: "the limit on the size of files (`ulimit -f`) is too low: set it to unlimited",
    errno.ENOMEM: "the limit on virtual memory (`ulimit -v`) is too low: set it to unlimited",
    errno.EMFILE: "the limit on open files (`ulimit -n`) is reached: raise it",
    errno.ENFILE: "the system has no more open files: raise fs.file-max",
    errno.ENOSYS: "the system has no memfd_create: Linux 3.17 or later is required, and a sandbox that allows it",
    errno.EPERM: "a sandbox forbids memfd_create: allow it, as Docker's own seccomp profile does",
    errno.EACCES: "a sandbox forbids memfd_create: allow it, as Docker's own seccomp profile does",
}


class Region:
    """Some pages of an arena, zeros at first. They stay lent until `release`; without it, for ever."""

    def __init__(self, arena: Arena, offset: int, size: int) -> None:
        self._arena = arena
        self.offset = offset
        self.address = arena.address + offset
        self.bytes = size
        self._released = False

    def release(self) -> None:
        """Once, at the second call nothing happens. Nobody may write here any more, this process or another."""
        if not self._released:
            self._released = True
            self._arena._free(self.offset, self.bytes)


class Arena:
    """See `mine`. Raises OSError where the system refuses it. Thread-safe."""

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
        self._regions = Regions(size, memfd.PAGE)
        # A tensor may die at any instruction of any thread, also of the one that holds the lock: so its region is left
        # here, without a lock, for whoever asks for one next.
        self._dead: collections.deque[int] = collections.deque()
        self._held_back: set[int] = set()

    def take(self, size: int) -> Region | None:
        """So many bytes, from the start of a page on. None: the arena is full."""
        with self._lock:
            self._bury()
            offset = self._regions.allocate(size)
            return None if offset is None else Region(self, offset, self._regions.size_of(offset))

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A flat tensor of zeros, whose region returns when the last view of it has died. None: the arena is full."""
        region = self.take(elements * dtype.itemsize)
        if region is None:
            return None
        # The storage holds this object, and nothing else does.
        held = (ctypes.c_char * region.bytes).from_address(region.address)
        weakref.finalize(held, self._die, region).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=elements)

    def _die(self, region: Region) -> None:
        if region.offset not in self._held_back:
            region.release()

    def touch(self, size: int) -> None:
        """Makes the pages of the next tensors, of so many bytes together, before they are asked for."""
        region = self.take(size)
        if region is not None:
            with contextlib.suppress(OSError):  # a kernel before 5.14
                memfd.populate(region.address, region.bytes)
            self._dead.append(region.offset)  # and its pages stay

    def quarantine(self, tensor: torch.Tensor) -> bool:
        """The tensor's region is never lent again: a peer that could not be stopped may still write into it.

        Whether the tensor lies here at all.
        """
        offset = self.offset_of(tensor.data_ptr(), tensor.nbytes)
        with self._lock:
            start = None if offset is None else self._regions.around(offset)
            if start is None:
                return False
            self._held_back.add(start)
            return True

    def offset_of(self, address: int, size: int) -> int | None:
        """Where in this arena the memory lies; None: not, or not all of it."""
        offset = address - self.address
        return offset if offset >= 0 and offset + size <= self.bytes else None

    @property
    def lent(self) -> int:
        """Bytes that are lent to tensors and groups now."""
        with self._lock:
            self._bury()
            return self._regions.lent

    def _free(self, offset: int, size: int) -> None:
        if os.getpid() != self._pid:  # the parent still uses it
            return
        memfd.give_back(self.address + offset, size)
        self._dead.append(offset)

    def _bury(self) -> None:
        while self._dead:
            self._regions.free(self._dead.popleft())

    def leave_to_parent(self) -> None:
        """In a forked child: tensors keep their values, but what the child writes into them stays its own."""
        reach = self._regions.reach
        # Somebody has closed the descriptor: the pages stay shared.
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
    """This process's arena, made when it is first asked for; None where there can be none, for the reason that
    `why_not` gives. A forked child has none of its parent's.
    """
    if _mine is None and not _why_not:
        with _making:
            _make()
    return _mine


def _make() -> None:
    global _mine, _why_not, _watching_forks
    if _mine is not None or _why_not:  # another thread was faster
        return
    if not environment.native():
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
    """Why `mine` is None, and what to do; empty while nothing speaks against it."""
    return _why_not


def zeros(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros on the CPU, in the arena if there is one with room, else as torch makes it."""
    arena = mine() if elements > 0 else None
    tensor = None if arena is None else arena.tensor(elements, dtype)
    return torch.zeros(elements, dtype=dtype, device="cpu") if tensor is None else tensor


def _sentence(size: int, error: OSError) -> str:
    return f"{math.ceil(size / 2**30)} GiB of shared memory can't be mapped: {what_to_do(error)}"


def what_to_do(error: OSError) -> str:
    """Why memory of this process can't be made or mapped, for the user."""
    return _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))


def _forked() -> None:
    global _mine, _why_not, _making
    arena, _mine, _why_not, _making = _mine, None, "", threading.Lock()
    if arena is not None:
        arena.leave_to_parent()
