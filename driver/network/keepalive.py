"""Asks the kernel to notice that the other end of a connection is gone without a word. Decides nothing."""

from __future__ import annotations

import socket

KEEPALIVE_S = 1  # the kernel's shortest


def expect_signs_of_life(sock: socket.socket, lease_s: float) -> None:
    """If for ``lease_s`` nothing is acknowledged, the connection ends with a timeout.

    Each host's kernel acknowledges a small packet every second, whatever the processes there do.
    """
    options = {
        socket.TCP_KEEPIDLE: KEEPALIVE_S,
        socket.TCP_KEEPINTVL: KEEPALIVE_S,
        socket.TCP_KEEPCNT: max(1, round(lease_s / KEEPALIVE_S) - 1),
        # Also where bytes are under way, for which there are no keepalives but repetitions at growing intervals.
        socket.TCP_USER_TIMEOUT: round(lease_s * 1000),
    }
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
