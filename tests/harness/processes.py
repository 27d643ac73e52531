"""Environment and search of the processes of a job that is observed from outside.

All processes of a job, also orphans, are found by an environment variable with a unique value, which they inherit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]


def clean_environment(*others: str) -> dict[str, str]:
    """Return this process's environment without variables of another job or with a prefix in ``others``.

    It has the Python environment's programs in PATH, one thread per process, no requests to a cloud's metadata server,
    and no preloaded process unless the job asks for it.
    """
    unwanted = ("ELASTIC_", "HOROVOD_", *others)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    ours = {"ELASTIC_PREEMPTION": "off", "ELASTIC_PRELOAD": "off"}
    return clean | {"PATH": path, "OMP_NUM_THREADS": "1"} | ours


def path_of_tests() -> dict[str, str]:
    """Return PYTHONPATH with the folder of `harness` and `stress`, for processes that import them."""
    path = filter(None, (str(TESTS), os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": os.pathsep.join(path)}


def kill_all(found: Callable[[], Iterable[psutil.Process]]) -> None:
    """Send SIGKILL until no process is left; a process that forks meanwhile is found in the next round."""
    while alive := list(found()):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def marked(entry: str) -> Iterator[psutil.Process]:
    """Iterate over live processes with ``NAME=value`` in their environment, with ``info["cmdline"]``; no zombies."""
    for process in psutil.process_iter():
        if _inherited(process.pid, entry.encode()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.info = process.as_dict(["cmdline", "status"])
                if not _ended(process):
                    yield process


def _inherited(pid: int, entry: bytes) -> bool:
    """Return whether a process has this in its environment; not one of another user."""
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def in_session(leader: int) -> Iterator[psutil.Process]:
    """Iterate over the live processes of a session, with ``info["cmdline"]``."""
    for process in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if not _ended(process) and os.getsid(process.pid) == leader:
                yield process


def _ended(process: psutil.Process) -> bool:
    """Return whether a process is a zombie. It has no command line; it may have ended after its status was read."""
    return process.info["cmdline"] is None or process.info["status"] == psutil.STATUS_ZOMBIE


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
