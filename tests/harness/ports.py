"""Ports for programs that get a port number and bind it themselves, without conflicts between parallel tests.

A port that was bound for a moment to find it may be taken before the program binds it. These ports are therefore
outside the range that the kernel uses for outgoing connections and for binds to port 0, and each process has its
own block. It claims the block with a socket name that the kernel frees when the process ends.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

FIRST, BLOCK = 10_000, 200
KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return an unused port that no other process receives while this one lives."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return ``count`` different ports. Ports are reused after 200 calls."""
    # by process id: after a fork, the child does not use its parent's
    ports = itertools.islice(_block(os.getpid()), number + BLOCK)
    found = list(itertools.islice(filter(_is_free, ports), number))
    if len(found) < number:
        raise RuntimeError(
            f"{number} free ports are needed, but only {len(found)} of {BLOCK} are free"
        )
    return found


@functools.cache
def _block(pid: int) -> Iterator[int]:
    """Claim a block of ports, and iterate over it endlessly."""
    low, high = map(int, KERNELS.read_text().split())
    blocks = range(FIRST, 65536 - BLOCK, BLOCK)
    outside = [first for first in blocks if first + BLOCK <= low or first > high]
    # If the kernel uses all ports, tests at least avoid each other's.
    for first in outside or blocks:
        claim = socket.socket(socket.AF_UNIX)
        try:
            # abstract names belong to this network namespace, as ports do
            claim.bind(f"\0hvd-elastic ports {first}")
        except OSError:
            claim.close()
        else:
            claim.detach()  # open until this process ends
            return itertools.cycle(range(first, first + BLOCK))
    raise RuntimeError(
        f"all blocks of {BLOCK} ports are used by running tests: wait until one ends"
    )


def _is_free(port: int) -> bool:
    """Return whether no socket listens on a port, on any address; a lingering connection does not count."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
