"""Delay line for packets between two ends of a cable: `python -m stress.hosts.netem A B MS`.

A and B are the names of two network interfaces that it creates, and that exist until it ends. Frames received at one
are sent from the other, delayed by `DelayedFrames`. A substitute for netem, which not all kernels include. It writes
``ready`` once the interfaces exist, and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

FRAME = 1 << 16
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
HELD_MOST = 10_000  # frames in one direction; further ones are dropped, as by a router


class DelayedFrames:
    """Queue of the frames in one direction, with their due times."""

    def __init__(self, delay_s: float, most: int = HELD_MOST) -> None:
        self._delay_s = delay_s
        self._most = most
        self._frames: deque[tuple[float, bytes]] = deque()

    def put(self, now: float, frame: bytes) -> None:
        if len(self._frames) < self._most:
            self._frames.append((now + self._delay_s, frame))

    def due(self, now: float) -> list[bytes]:
        """Return the frames that are due, oldest first."""
        found = []
        while self._frames and self._frames[0][0] <= now:
            found.append(self._frames.popleft()[1])
        return found

    def next_at(self) -> float | None:
        return self._frames[0][0] if self._frames else None


def main(arguments: Sequence[str]) -> int:
    first, second, delay_ms = arguments
    ends = [_interface(first), _interface(second)]
    held = {end: DelayedFrames(float(delay_ms) / 1e3) for end in ends}
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    print("ready", flush=True)
    stdin = sys.stdin.fileno()
    while True:
        wakes = [at for each in held.values() if (at := each.next_at()) is not None]
        patience = max(0.0, min(wakes) - time.monotonic()) if wakes else None
        readable, _, _ = select.select([stdin, *ends], [], [], patience)
        if stdin in readable and not os.read(stdin, FRAME):
            return 0
        for end in ends:
            if end in readable:
                _take(end, held[end])
            for frame in held[end].due(time.monotonic()):
                _put(other[end], frame)


def _interface(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def _take(end: int, held: DelayedFrames) -> None:
    while True:
        try:
            held.put(time.monotonic(), os.read(end, FRAME))
        except BlockingIOError:
            return
        except OSError:  # the interface is down
            return


def _put(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:
        return  # down or full: lost, as on any cable


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
