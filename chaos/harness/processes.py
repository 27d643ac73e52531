"""The processes of a job that is watched from outside: their environment, and how they are found again.

Whatever a job starts inherits one environment variable with a unique value; by it all its processes are found, orphans
included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MarkedProcess:
    """A live one."""

    pid: int
    state: str  # as in /proc: R running, S sleeping, T stopped, ...
    command: str


def clean_environment(*others: str) -> dict[str, str]:
    """Ours without traces of another job, and without variables that begin with ``others``.

    With the environment's programs, one thread per process, and no questions to the cloud that this machine may be of.
    """
    unwanted = ("ELASTIC_", "HOROVOD_", *others)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    return clean | {"PATH": path, "OMP_NUM_THREADS": "1", "ELASTIC_PREEMPTION": "off"}


def kill_all(found: Callable[[], Iterable[MarkedProcess]]) -> None:
    """SIGKILL, until there are none: one that forks while it's being looked for is met in the next round."""
    while alive := list(found()):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)


def marked(entry: str) -> Iterator[MarkedProcess]:
    """The live processes whose environment has ``NAME=value``; zombies have none, and don't count."""
    wanted = entry.encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended meanwhile, or isn't ours
        if state not in "ZX":
            yield MarkedProcess(int(folder.name), state, command.strip())
