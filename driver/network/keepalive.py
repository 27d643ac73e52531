"""Keepalive settings by which the kernel detects a lost connection. Decides nothing."""

from __future__ import annotations

import socket

KEEPALIVE_S = 1  # the kernel's minimum


def expect_signs_of_life(sock: socket.socket, lease_s: float) -> None:
    """End the connection with a timeout if nothing is acknowledged for ``lease_s``.

    Each host's kernel acknowledges a small packet every second, whatever its processes do.
    """
    options = {
        socket.TCP_KEEPIDLE: KEEPALIVE_S,
        socket.TCP_KEEPINTVL: KEEPALIVE_S,
        socket.TCP_KEEPCNT: max(1, round(lease_s / KEEPALIVE_S) - 1),
        # Also for data in flight, which have no keepalives but retransmissions at growing intervals.
        socket.TCP_USER_TIMEOUT: round(lease_s * 1000),
    }
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
