"""Resources that a process holds, measured from outside, and leaked ones."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

SEGMENTS = Path("/dev/shm")


def measure(pid: int) -> dict[str, float]:
    """Return the current resources of a process, by the keys of `growth.QUANTITIES`. Raises OSError if it is gone."""
    descriptors = _descriptors(pid)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "fds": float(len(descriptors)),
        "threads": float(len(os.listdir(f"/proc/{pid}/task"))),
        "sockets": float(sum(target.startswith("socket:") for target in descriptors)),
        "shm": float(len(_segments_of(pid, descriptors))),
    }


def _descriptors(pid: int) -> list[str]:
    """Return the target of each open descriptor."""
    targets = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            targets.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return targets


def _segments_of(pid: int, descriptors: list[str]) -> set[str]:
    """Return the paths of the shared-memory segments that a process has mapped or open."""
    within = f"{SEGMENTS}/"
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if within in line}
    return {path for path in (*mapped, *descriptors) if path.startswith(within)}


def segments() -> set[str]:
    return {f"{SEGMENTS}/{name}" for name in os.listdir(SEGMENTS)} if SEGMENTS.is_dir() else set()


def unused_segments() -> set[str]:
    """Return the segments of this user that no process has mapped or open, and that are therefore never freed."""
    found = {}
    for path in segments():
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.getuid():
                found[path] = status.st_ino
    used = set[int]()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            used |= _inodes_of(pid)
    return {path for path, inode in found.items() if inode not in used and os.path.exists(path)}


def _inodes_of(pid: int) -> set[int]:
    """Return the inodes of the segments that a process has mapped or open.

    The path of a mapping can be another one: sem_open() maps a semaphore before it links its name.
    """
    inodes = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if f"{SEGMENTS}/" in line:
            inodes.add(int(line.split(maxsplit=5)[4]))
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            if os.readlink(f"/proc/{pid}/fd/{entry}").startswith(f"{SEGMENTS}/"):
                inodes.add(os.stat(f"/proc/{pid}/fd/{entry}").st_ino)
    return inodes


def processes_of(folder: Path) -> list[int]:
    """Return the processes that still run the soak's training."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid() and str(folder) in " ".join(process.info["cmdline"] or ())
    ]
