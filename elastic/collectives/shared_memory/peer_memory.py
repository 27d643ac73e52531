"""Memory of other processes of this host: who this process is, and what it has mapped of others. Acts.

A peer's memory is opened as /proc/PID/fd/N, and used only if the process and the memory are found to be those that the
peer told: a process id or a number of a descriptor may have gone to another by then. An arena stays mapped for as long
as its process lives, so that a new generation need not touch all its pages anew.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import errno
import os
import select
import threading
from dataclasses import dataclass

from elastic.collectives.shared_memory import memfd
from elastic.collectives.topology import Host, Identity, Shareable

_PROC = "/proc"

_WHAT_TO_DO = {
    errno.EACCES: "it runs as another user, or access is denied; run the ranks of a host as one user, without"
    " setuid and file capabilities",
    errno.ENOENT: "it exited, or /proc does not show it; mount /proc without hidepid, and run the ranks of a host"
    " in one container",
    errno.EMFILE: "the limit on open files (`ulimit -n`) is reached; raise it",
    errno.ENFILE: "the system has no more open files; raise fs.file-max",
    errno.ENOMEM: "the limit on virtual memory (`ulimit -v`) or vm.max_map_count is reached; raise it",
    errno.ENOSYS: "the system has no pidfd_open; Linux 5.3 or later is required, and a sandbox that allows it",
}
_WHAT_TO_DO[errno.EPERM] = _WHAT_TO_DO[errno.EACCES]
_WHAT_TO_DO[errno.ESRCH] = _WHAT_TO_DO[errno.ENOENT]


class Unreachable(Exception):
    """A peer's memory can't be mapped; a sentence for the user."""


@dataclass
class _Mapped:
    """A peer's memory, mapped here. ``pidfd`` becomes readable when its process is gone."""

    owner: Identity
    inode: int
    address: int
    bytes: int
    pidfd: int
    keep: bool
    users: int = 0

    def gone(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def drop(self) -> None:
        os.close(self.pidfd)
        if self.keep:
            # Nobody else has the pages of a process that has gone: the system frees each of them, 50 ms for 100 MB, and
            # the next world would wait for it. Not by `threading`, whose locks this thread may hold.
            try:
                _thread.start_new_thread(memfd.unmap, (self.address, self.bytes))
                return
            except RuntimeError:  # no thread can be had
                pass
        memfd.unmap(self.address, self.bytes)


class Mapping:
    """One use of a peer's memory, until `release`. The descriptor is borrowed."""

    def __init__(self, mapped: _Mapped) -> None:
        self._mapped: _Mapped | None = mapped
        self.address = mapped.address
        self.bytes = mapped.bytes
        self.pidfd = mapped.pidfd

    def release(self) -> None:
        """The memory is not touched any more by this use. Once; later calls do nothing. Never blocks."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            _released.append(mapped)
            _settle()


_open: dict[tuple[Identity, int], _Mapped] = {}  # by owner and inode
_lock = threading.Lock()
# A group may be freed at any instruction of any thread, also of the one that holds the lock: so what it used is left
# here, without a lock.
_released: collections.deque[_Mapped] = collections.deque()
_watching_forks = False


def myself() -> Identity:
    """This process. Raises Unreachable where the system does not tell what it takes to be found by others."""
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        host = Host(boot, _namespace("pid"), _namespace("net"))
        return Identity(host, os.getpid(), _started("self"), os.geteuid())
    except (OSError, ValueError, IndexError) as error:
        raise Unreachable(f"/proc does not show this process ({error}); mount it") from error


def cores() -> bytes:
    """On which cores this process may run; see `topology.RankInfo`."""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def open_peer(owner: Identity, offered: Shareable, keep: bool = False) -> Mapping:
    """Maps what a process of this host offers. ``keep``: it stays mapped without a use, for as long as the process
    lives. Raises Unreachable.
    """
    try:
        with _lock:
            return Mapping(_find(owner, offered, keep))
    except OSError as error:
        what = _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))
        raise Unreachable(f"memory of process {owner.pid} can't be mapped: {what}") from error
    finally:
        _settle()


def sweep() -> None:
    """Unmaps what nobody uses of processes that are gone: until then their memory stays taken."""
    with _lock:
        for mapped in list(_open.values()):
            _drop_unused(mapped)
    _settle()


def _find(owner: Identity, offered: Shareable, keep: bool) -> _Mapped:
    global _watching_forks
    key = (owner, offered.inode)
    if key not in _open:
        _open[key] = _map(owner, offered, keep)
        if not _watching_forks:
            _watching_forks = True
            os.register_at_fork(after_in_child=_forked)
    _open[key].users += 1
    return _open[key]


def _settle() -> None:
    # Whoever holds the lock does this once it has let go of it.
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                mapped = _released.popleft()
                mapped.users -= 1
                _drop_unused(mapped)
        finally:
            _lock.release()


def _drop_unused(mapped: _Mapped) -> None:
    key = (mapped.owner, mapped.inode)
    if mapped.users == 0 and _open.get(key) is mapped and (not mapped.keep or mapped.gone()):
        del _open[key]
        mapped.drop()


def _map(owner: Identity, offered: Shareable, keep: bool) -> _Mapped:
    with contextlib.ExitStack() as undo:
        # First of all: from here on the process id can't pass to another without this telling.
        pidfd = os.pidfd_open(owner.pid)
        undo.callback(os.close, pidfd)
        if _started(str(owner.pid)) != owner.started:
            raise Unreachable(f"process {owner.pid} exited, and another has its ID")
        fd = os.open(f"{_PROC}/{owner.pid}/fd/{offered.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (offered.inode, offered.bytes):
                raise Unreachable(
                    f"descriptor {offered.fd} of process {owner.pid} is not the memory that it offered: a program"
                    " must not close descriptors that it did not open"
                )
            address = memfd.map_shared(fd, offered.bytes)
        finally:
            os.close(fd)
        undo.pop_all()
        return _Mapped(owner, offered.inode, address, offered.bytes, pidfd, keep)


def _started(process: str) -> int:
    """When it started. The program's name, which stands before that in parentheses, may contain anything."""
    with open(f"{_PROC}/{process}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _namespace(kind: str) -> int:
    return os.stat(f"{_PROC}/self/ns/{kind}").st_ino


def _forked() -> None:
    """In a forked child: the memory of a peer that dies must not stay taken for as long as the child lives."""
    global _lock
    _lock = threading.Lock()
    for mapped in _open.values():
        with contextlib.suppress(OSError):
            os.close(mapped.pidfd)
            memfd.unmap(mapped.address, mapped.bytes)
    _open.clear()
    _released.clear()
