"""Ways to stop a live process: its cgroup is frozen, or a debugger holds it. Undone at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.driver.processes import proc_stats
from harness.waiting import wait_until

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 60.0
FILES = {"unified": ("cgroup.freeze", "1", "0"), "freezer": ("freezer.state", "FROZEN", "THAWED")}


class Freezer:
    """A separate cgroup, initially empty. In the old kind, ``freezer``, not even SIGKILL ends a frozen process."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._file, self._on, self._off = FILES[kind]

    def freeze(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))
        (self._folder / self._file).write_text(self._on)
        wait_until(lambda: proc_stats.frozen(pid), f"frozen process {pid}")

    def thaw(self) -> None:
        (self._folder / self._file).write_text(self._off)


@contextlib.contextmanager
def freezer(kind: str) -> Iterator[Freezer]:
    """Skip the test if this kind of cgroup can't be created."""
    mount = proc_stats.parse_mounts(Path("/proc/self/mounts").read_bytes()).get(kind)
    if mount is None:
        pytest.skip(f"no cgroups of the kind {kind!r} here")
    folder = Path(mount) / f"elastic-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}; run as root")
    made = Freezer(folder, kind)
    try:
        yield made
    finally:
        made.thaw()
        procs = folder / "cgroup.procs"
        wait_until(lambda: not leave(procs), "an empty cgroup")
        folder.rmdir()


def leave(procs: Path) -> str:
    """Return remaining processes to the root."""
    left = procs.read_text()
    for pid in left.split():
        with contextlib.suppress(OSError):
            (procs.parents[1] / "cgroup.procs").write_text(pid)
    return procs.read_text()


@contextlib.contextmanager
def debugged(pid: int) -> Iterator[None]:
    """Hold all threads of the process by a debugger. Skips the test if that is forbidden."""
    debugger = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "debugger.py"), str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert debugger.stdin is not None and debugger.stdout is not None
    try:
        said = debugger.stdout.readline()
        if said != "holds it\n":
            pytest.skip(f"no debugger can be attached here: {said.strip()}; run as root")
        yield
    finally:
        debugger.stdin.close()
        debugger.wait(DEADLINE_S)
        debugger.stdout.close()
