"""Private folder for an agent that an engine such as Ray starts, and queries about its Python interpreter."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

PATH_LIMIT = 107  # maximum length of the address of a Unix socket, in bytes
PREFIX = "hvd-elastic-"
LOCK = "held-by-actor"


def make_folder() -> tuple[Path, int]:
    """Create a private folder with a path that is short enough for a Unix socket.

    Return the path and a file descriptor, which holds a lock on the folder, so that `sweep` does not remove the folder.
    """
    where = tempfile.gettempdir()
    if len(os.fsencode(where)) + len(PREFIX) + 24 > PATH_LIMIT:
        where = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    # Lock the folder before the rename, so that `sweep` never finds it unlocked.
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "new").rename(folder / LOCK)
    return folder, lock


def sweep() -> None:
    """Remove the folders of killed processes, which no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def own_path(python: str, limit_s: float) -> list[str]:
    """Return the default ``sys.path`` of a Python interpreter.

    Raises:
        OSError: ``python`` can't be started.
        SubprocessError: ``python`` failed, or did not finish within ``limit_s`` seconds.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"],
        cwd="/",
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=limit_s,
        check=True,
    )
    path: list[str] = json.loads(done.stdout.splitlines()[-1])
    return path


def programs(python: str, folder: Path) -> str:
    """Return a folder in which the program ``python`` is this interpreter. If necessary, create it in ``folder``."""
    programs = os.path.dirname(python)
    if os.access(os.path.join(programs, "python"), os.X_OK):
        return programs
    # The program may be missing, for example if only /usr/bin/python3 exists. Write a script instead of a link, because
    # Python finds its virtual environment by its own path.
    made = folder / "bin"
    made.mkdir()
    script = made / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n')
    script.chmod(0o700)
    return str(made)


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
