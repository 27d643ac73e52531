"""Detection of files that have changed since this process started, by their timestamps."""

from __future__ import annotations

import os
import time

# The kernel counts process start times in ticks of 10 ms, and file times in steps of 1 to 10 ms.
ERROR_S = 0.03
COARSE_S = 2.0  # resolution in seconds of file times on FAT, the coarsest of any file system


def process_began_at() -> float:
    """Return a lower bound of this process's start time, in seconds since 1970, comparable with file times."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s - ERROR_S


def changed_since(path: str, began_at: float) -> bool:
    """Return whether a file may have changed since ``began_at``, a time in seconds since 1970.

    Raises:
        OSError: the file does not exist or cannot be accessed.
    """
    return modified_since(os.stat(path), began_at)


def modified_since(status: os.stat_result, began_at: float) -> bool:
    """Return whether a file with this status may have changed since ``began_at``, a time in seconds since 1970."""
    whole_seconds = status.st_mtime_ns % 1_000_000_000 == 0
    return status.st_mtime + (COARSE_S if whole_seconds else 0.0) >= began_at
