"""Start of worker processes in separate sessions, and explanations of failed starts. Makes no decisions.

A worker is killed when the thread that started it exits (PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence

PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    announce: Callable[[int], None],
    *,
    folder: str | None = None,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process in a new session, with pipes for stdout and stderr.

    Args:
        command: program and arguments.
        env: environment.
        announce: called in the child, with its process ID, before the program runs.
        folder: working folder (default: the current one).
        pass_fds: file descriptors that the child inherits.
        stdin: file descriptor for standard input (default: /dev/null).

    Raises:
        OSError: the program can't be started.
        SubprocessError: ``announce`` raised an exception in the child.
        ValueError: an argument or variable contains a null character.
    """
    driver = os.getpid()

    def before_exec() -> None:  # runs in the child
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != driver:  # the driver exited before PDEATHSIG was set
            os.kill(os.getpid(), signal.SIGKILL)
        announce(os.getpid())

    with warnings.catch_warnings():
        # Python 3.12 warns about a fork in a multi-threaded process. Here it is safe: the child makes only a few system
        # calls before exec.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=before_exec,
        )


def why_not_started(program: str, error: Exception) -> str:
    """Return a sentence with the cause of a failed start and a remedy."""
    match getattr(error, "errno", None):
        case errno.ENOENT | errno.ENOTDIR:
            if os.path.exists(program):
                return (
                    f"cannot start {program!r}: the interpreter named in its first line is missing"
                )
            return f"cannot start {program!r}: it does not exist; check the name and PATH"
        case errno.EACCES:
            return f"cannot start {program!r}: it is not executable; try `chmod +x` or `python {program}`"
        case errno.ENOEXEC:
            return f"cannot start {program!r}: not executable; add a first line such as #!/bin/sh"
        case errno.EAGAIN | errno.ENOMEM:
            return f"cannot start {program!r}: the host is out of processes or memory; check `ulimit -u`"
        case errno.E2BIG:
            return f"cannot start {program!r}: its arguments and environment are too long; shorten them"
        case _:
            return f"cannot start {program!r}: {error}"
