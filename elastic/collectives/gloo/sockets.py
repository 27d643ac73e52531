"""Find the sockets that Gloo opened for one group, by their addresses, to close or hide them.

Gloo has no abort: a rank that waits for a frozen peer blocks in the kernel until the group's timeout. ``shutdown(2)``
on the group's connections ends the wait immediately. Python has no handle to them, so they are found in the list of
open descriptors: a group has one listener with a unique port. Accepted connections use that port, and outgoing
connections lead to a peer's listener. No other socket in the process can have these addresses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
from collections.abc import Iterator

Endpoint = tuple[str, int]  # numeric address and port

_DESCRIPTORS = "/dev/fd"  # folder of open descriptors, /proc/self/fd on Linux


def find_listener(blob: bytes) -> Endpoint | None:
    """Find the group's listening socket: the one whose C address occurs in ``blob``, the data that Gloo publishes."""
    for _, held in _sockets():
        with contextlib.suppress(OSError):
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = held.getsockname()
                if _c_address(held.family, name) in blob:
                    return (name[0], name[1])
    return None


def identities(own: Endpoint | None, peers: frozenset[Endpoint]) -> frozenset[int]:
    """Return the inodes of the group's sockets, once it is connected.

    While the group is created, addresses identify them. Later, the other end may have closed its port, and a group of
    the next generation may use the port again. The inode of a socket never changes.
    """
    return frozenset(os.fstat(held.fileno()).st_ino for _, held in _of_group(own, peers))


def cut(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> int:
    """Shut down every connection of the group with listener ``own``, and return their number.

    This function never blocks.

    The listener itself remains open: Gloo ends the process if ``accept`` fails (listener.cc throws in its own thread),
    and no thread of this process waits in it.

    Args:
        own: address of the group's listener.
        peers: addresses of the other ranks' listeners.
        known: the group's `identities`, or None while the group is being created.
    """
    count = 0
    for _, held in _of_group(own, peers, known):
        with contextlib.suppress(OSError):
            if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                held.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def count(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> int:
    """Return the number of open connections of the group. Gloo closes connections to lost peers."""
    return sum(
        held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        for _, held in _of_group(own, peers, known)
    )


def unread(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> int:
    """Return the number of received bytes that Gloo has not read.

    They can still be read after the socket is shut down.
    """
    total = 0
    for _, held in _of_group(own, peers, known):
        with contextlib.suppress(OSError):
            if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                waiting = fcntl.ioctl(held.fileno(), termios.FIONREAD, bytes(4))
                total += int.from_bytes(waiting, sys.byteorder)
    return total


def keep_from_programs(own: Endpoint | None, peers: frozenset[Endpoint]) -> None:
    """Mark the group's descriptors as close-on-exec, because Gloo leaves them inheritable by child programs."""
    for fd, _ in _of_group(own, peers):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)


def release_in_child(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> None:
    """Release the group's sockets in a forked child, so that the parent's exit closes them.

    The descriptors are redirected to /dev/null rather than closed: the inherited C++ objects still hold their numbers
    and would close descriptors that reuse the numbers.
    """
    numbers = [fd for fd, _ in _of_group(own, peers, known)]
    if numbers:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in numbers:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


def _of_group(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> Iterator[tuple[int, socket.socket]]:
    if own is None and not peers:
        return
    for fd, held in _sockets():
        try:
            if known is not None:
                ours = os.fstat(held.fileno()).st_ino in known
            else:
                ours = held.getsockname()[:2] == own or held.getpeername()[:2] in peers
        except OSError:  # The socket is not connected, or another thread has closed it.
            continue
        if ours:
            yield fd, held


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield every TCP socket of the process as (descriptor, duplicate). The duplicate is closed after each iteration.

    Addresses are read from the duplicate, since another thread may close and reuse the descriptor between any two
    calls.
    """
    for name in os.listdir(_DESCRIPTORS):
        try:
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            copy = os.dup(fd)
        except (OSError, ValueError):
            continue
        try:
            held = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # The constructor does not close the socket on failure.
            continue
        with held:
            if held.family in (socket.AF_INET, socket.AF_INET6):
                yield fd, held


def _c_address(family: int, name: tuple[str, int]) -> bytes:
    """Return the first bytes of the C struct sockaddr_in or sockaddr_in6 that contains this address."""
    head = struct.pack("=H", family) + struct.pack("!H", name[1])
    packed = socket.inet_pton(family, name[0].partition("%")[0])
    return head + packed if family == socket.AF_INET else head + bytes(4) + packed
