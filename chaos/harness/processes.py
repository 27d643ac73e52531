"""The processes of a job that is watched from outside: their environment, and how they are found again.

Whatever a job starts inherits one environment variable with a unique value; by it all its processes are found, orphans
included.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil


def clean_environment(*others: str) -> dict[str, str]:
    """Ours without traces of another job, and without variables that begin with ``others``.

    With the environment's programs, one thread per process, no requests to a cloud's metadata server, and no preloaded
    process that the job was not told to keep.
    """
    unwanted = ("ELASTIC_", "HOROVOD_", *others)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    ours = {"ELASTIC_PREEMPTION": "off", "ELASTIC_PRELOAD": "off"}
    return clean | {"PATH": path, "OMP_NUM_THREADS": "1"} | ours


def kill_all(found: Callable[[], Iterable[psutil.Process]]) -> None:
    """SIGKILL, until there are none: one that forks while it's being looked for is met in the next round."""
    while alive := list(found()):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def marked(entry: str) -> Iterator[psutil.Process]:
    """The live processes whose environment has ``NAME=value``, with ``info["cmdline"]``; zombies don't count."""
    name, _, value = entry.partition("=")
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        environ = process.info["environ"] or {}  # None: it isn't ours
        if environ.get(name) == value and not _ended(process):
            yield process


def in_session(leader: int) -> Iterator[psutil.Process]:
    """The live processes of this session, with ``info["cmdline"]``."""
    for process in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if not _ended(process) and os.getsid(process.pid) == leader:
                yield process


def _ended(process: psutil.Process) -> bool:
    """A zombie has no command line; it may be one only since its status was read."""
    return process.info["cmdline"] is None or process.info["status"] == psutil.STATUS_ZOMBIE


def lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended: a zombie has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
