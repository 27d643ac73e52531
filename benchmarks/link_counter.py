"""Record the bytes that leave a network interface: `python link_counter.py FILE`, until it is killed.

Writes a line ``seconds bytes`` every `EVERY_S`, on the machine's monotonic clock, for eth0 of the network namespace in
which it runs. Does not import torch, because it must not disturb the programs that it observes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

EVERY_S = 0.01
COUNTERS = Path("/proc/net/dev")  # of the reader's network namespace


def sent_bytes(counters: str, interface: str = "eth0") -> int:
    """Return the bytes sent by an interface.

    Args:
        counters: content of /proc/net/dev.
    """
    for line in counters.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            return int(values.split()[8])
    raise ValueError(f"network interface {interface} does not exist")


def samples_of(text: str) -> list[tuple[float, int]]:
    """Parse the complete lines of a record: seconds and bytes, oldest first."""
    lines = [line.split() for line in text.split("\n")[:-1]]
    return [(float(at), int(sent)) for at, sent in lines]


def peak(samples: Sequence[tuple[float, int]], window_s: float) -> int:
    """Return the most bytes sent between a sample and the last one within ``window_s`` seconds of it."""
    most = end = 0
    for at, sent in samples:
        while end + 1 < len(samples) and samples[end + 1][0] <= at + window_s:
            end += 1
        most = max(most, samples[end][1] - sent)
    return most


def main(path: str) -> None:
    with Path(path).open("w", buffering=1) as file:
        while True:
            file.write(f"{time.monotonic():.6f} {sent_bytes(COUNTERS.read_text())}\n")
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main(sys.argv[1])
