"""Ports for programs that are told one and bind it themselves, so that of two tests none binds the other's.

A port that was bound for a moment to find it may be anybody's before the program binds it. So these lie outside the
range that the kernel takes ports of, for outgoing connections and for those who bind port 0, and each process that asks
has a block of its own. It claims the block with a name that the kernel frees when the process ends, however it ends.
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
    """One that nothing is bound to, and that no other process is given as long as this one lives."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """As many different ones. A process is given the same again after 200."""
    ports = itertools.islice(_block(os.getpid()), number + BLOCK)  # not a parent's, after a fork
    found = list(itertools.islice(filter(_is_free, ports), number))
    if len(found) < number:
        raise RuntimeError(f"{number} ports were wanted; of {BLOCK} only {len(found)} are free")
    return found


@functools.cache
def _block(pid: int) -> Iterator[int]:
    """Again and again."""
    low, high = map(int, KERNELS.read_text().split())
    blocks = range(FIRST, 65536 - BLOCK, BLOCK)
    outside = [first for first in blocks if first + BLOCK <= low or first > high]
    # Where the kernel takes all, tests at least keep out of each other's way.
    for first in outside or blocks:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0hvd-elastic ports {first}")  # as ports, of this network namespace
        except OSError:
            claim.close()
        else:
            claim.detach()  # open until this process ends
            return itertools.cycle(range(first, first + BLOCK))
    raise RuntimeError(f"all blocks of {BLOCK} ports are claimed by processes of tests that run")


def _is_free(port: int) -> bool:
    """Whether nobody listens there, on any address; a connection that lingers is in nobody's way."""
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
