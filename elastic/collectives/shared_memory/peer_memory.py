"""Mappings of the memory of other processes on this host, and the identity of this process.

A peer's memory is opened as /proc/PID/fd/N and used only if the process and the memory are the ones that the peer
published, since a process ID or descriptor number may have been reused. An arena remains mapped until its process
exits, so that a new generation need not touch all its pages again.
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

from elastic.collectives.backend_selection import Host, Identity, Shareable
from elastic.collectives.shared_memory import memfd

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


class PeerMemoryUnavailable(Exception):
    """Error raised when a peer's memory cannot be mapped. The message is shown to the user."""


@dataclass
class _Mapped:
    """Mapping of a peer's memory. ``pidfd`` becomes readable when its process exits."""

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
            # The system frees the pages of an exited process in this call, which takes 50 ms for 100 MB, so another
            # thread makes the call. It is not started by `threading`, whose locks this thread may hold.
            try:
                _thread.start_new_thread(memfd.unmap, (self.address, self.bytes))
                return
            except RuntimeError:  # No thread could be started: unmap in this thread.
                pass
        memfd.unmap(self.address, self.bytes)


class Mapping:
    """Reference to the mapping of a peer's memory, valid until `release`. The descriptor is borrowed."""

    def __init__(self, mapped: _Mapped) -> None:
        self._mapped: _Mapped | None = mapped
        self.address = mapped.address
        self.bytes = mapped.bytes
        self.pidfd = mapped.pidfd

    def release(self) -> None:
        """Drop this reference to the mapping. Idempotent, and never blocks."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            _released.append(mapped)
            _settle()


_open: dict[tuple[Identity, int], _Mapped] = {}  # mapped memory, by owner and inode
_lock = threading.Lock()
# The garbage collector may free a group at any point in any thread, even in the one that holds the lock. Released
# mappings are therefore added here without a lock.
_released: collections.deque[_Mapped] = collections.deque()
_watching_forks = False


def myself() -> Identity:
    """Return the identity of this process.

    Raises:
        PeerMemoryUnavailable: the system does not provide the identity.
    """
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        host = Host(boot, _namespace("pid"), _namespace("net"))
        return Identity(host, os.getpid(), _started("self"), os.geteuid())
    except (OSError, ValueError, IndexError) as error:
        raise PeerMemoryUnavailable(
            f"/proc has no entry for this process ({error}): mount /proc"
        ) from error


def cores() -> bytes:
    """Return the mask of cores on which this process may run. See `backend_selection.RankInfo`."""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def open_peer(owner: Identity, offered: Shareable, keep: bool = False) -> Mapping:
    """Map the memory that a process on this host offers.

    Args:
        owner: identity of the process.
        offered: the memory that the process offers.
        keep: whether to keep the memory mapped until the process exits, even if it is unused.

    Raises:
        PeerMemoryUnavailable: the memory cannot be mapped.
    """
    try:
        with _lock:
            return Mapping(_find(owner, offered, keep))
    except OSError as error:
        what = _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))
        raise PeerMemoryUnavailable(
            f"the memory of process {owner.pid} can't be mapped: {what}"
        ) from error
    finally:
        _settle()


def sweep() -> None:
    """Unmap unused memory of exited processes, because the memory remains allocated while it is mapped."""
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
    # The thread that holds the lock sweeps after releasing it.
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
        # The pidfd is opened first, so that any later reuse of the process ID is detected.
        pidfd = os.pidfd_open(owner.pid)
        undo.callback(os.close, pidfd)
        if _started(str(owner.pid)) != owner.started:
            raise PeerMemoryUnavailable(
                f"process {owner.pid} has exited, and a new process has the same process ID: wait for the next world"
            )
        fd = os.open(f"{_PROC}/{owner.pid}/fd/{offered.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (offered.inode, offered.bytes):
                raise PeerMemoryUnavailable(
                    f"file descriptor {offered.fd} of process {owner.pid} no longer refers to the shared memory:"
                    " check that the script closes only its own file descriptors"
                )
            address = memfd.map_shared(fd, offered.bytes)
        finally:
            os.close(fd)
        undo.pop_all()
        return _Mapped(owner, offered.inode, address, offered.bytes, pidfd, keep)


def _started(process: str) -> int:
    """Return the start time of a process, from its /proc/PID/stat.

    The program's name, in parentheses before the start time, may contain any characters.
    """
    with open(f"{_PROC}/{process}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _namespace(kind: str) -> int:
    return os.stat(f"{_PROC}/self/ns/{kind}").st_ino


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for mapped in _open.values():
        with contextlib.suppress(OSError):
            os.close(mapped.pidfd)
            memfd.unmap(mapped.address, mapped.bytes)
    _open.clear()
    _released.clear()
