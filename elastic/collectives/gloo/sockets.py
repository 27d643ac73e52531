"""Finds, by address, the sockets that one group opened inside Gloo, and cuts or hides them. Never anyone else's.

Gloo has no abort: a rank that waits for a frozen peer sits in the kernel until the group's timeout. What ends the wait
at once is ``shutdown(2)`` on the group's own connections. Python does not own them, so they are found in the list of
open descriptors: a group has one listener, on a port of its own; the connections it accepted carry that port, those it
opened lead to a peer's listener. Nothing else in the process can have either address.
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

Endpoint = tuple[str, int]  # numeric address, port

_DESCRIPTORS = "/dev/fd"  # /proc/self/fd on Linux


def find_listener(blob: bytes) -> Endpoint | None:
    """Which listening socket of this process is the one whose C address stands in ``blob`` (what Gloo publishes)."""
    for _, held in _sockets():
        with contextlib.suppress(OSError):
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = held.getsockname()
                if _c_address(held.family, name) in blob:
                    return (name[0], name[1])
    return None


def identities(own: Endpoint | None, peers: frozenset[Endpoint]) -> frozenset[int]:
    """The inodes of the group's sockets, once it is connected.

    Addresses tell them apart while the group is made. Later a port may have been closed at the other end and given to
    a group of the next generation; an inode stays with its socket.
    """
    return frozenset(os.fstat(held.fileno()).st_ino for _, held in _of_group(own, peers))


def cut(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> int:
    """Shuts down every connection of the group with listener ``own``; returns how many. Never blocks.

    ``known`` are its `identities`, None while it is being made.

    The listener itself is left alone: Gloo ends the whole process when ``accept`` fails (listener.cc throws in its
    own thread), and nobody in this process waits in it.
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
    """How many connections of the group this process still holds. Gloo closes those whose peer is gone."""
    return sum(
        held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        for _, held in _of_group(own, peers, known)
    )


def unread(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> int:
    """How many bytes have come for the group that Gloo has not read. A socket that is cut still gives them out."""
    total = 0
    for _, held in _of_group(own, peers, known):
        with contextlib.suppress(OSError):
            if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                waiting = fcntl.ioctl(held.fileno(), termios.FIONREAD, bytes(4))
                total += int.from_bytes(waiting, sys.byteorder)
    return total


def keep_from_programs(own: Endpoint | None, peers: frozenset[Endpoint]) -> None:
    """Closes the group's descriptors in programs that the process starts; Gloo leaves them inheritable."""
    for fd, _ in _of_group(own, peers):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)


def release_in_child(
    own: Endpoint | None, peers: frozenset[Endpoint], known: frozenset[int] | None = None
) -> None:
    """For a forked child: lets go of the group's sockets, so that the parent's death closes them.

    The numbers are pointed at /dev/null rather than closed: the C++ objects that the child inherited still know them,
    and would close whatever took their place.
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
        except OSError:  # not connected, or gone meanwhile
            continue
        if ours:
            yield fd, held


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of the process as (descriptor, duplicate). The duplicate is closed after each turn.

    The addresses are read from the duplicate: the number itself may be closed and reused by another thread between
    any two calls, a duplicate stays what it was when it was made.
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
            os.close(copy)  # the constructor does not close it when it fails
            continue
        with held:
            if held.family in (socket.AF_INET, socket.AF_INET6):
                yield fd, held


def _c_address(family: int, name: tuple[str, int]) -> bytes:
    """The start of the C struct sockaddr_in or sockaddr_in6 with this address."""
    head = struct.pack("=H", family) + struct.pack("!H", name[1])
    packed = socket.inet_pton(family, name[0].partition("%")[0])
    return head + packed if family == socket.AF_INET else head + bytes(4) + packed
