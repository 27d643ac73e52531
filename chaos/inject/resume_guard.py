"""Guard that resumes a stopped process if this process exits without resuming it, even after SIGKILL.

A small separate process waits at a pipe that the kernel closes when this process exits. It refers to the victim by the
given pidfd, so that it can never continue another process.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """\
import signal, sys
sys.stdin.buffer.read()
try:
    signal.pidfd_send_signal(int(sys.argv[1]), signal.SIGCONT)
except ProcessLookupError:
    pass
"""


class Guard:
    """A child process that continues the victim if this process exits.

    Create it before the victim is stopped, and `close` it when the victim continues.
    """

    def __init__(self, pidfd: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(pidfd)],
            pass_fds=[pidfd],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the guard.
        )

    def close(self) -> None:
        """End the child process."""
        # The guard is killed before the pipe is closed, because a closed pipe would make the guard resume the victim.
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
