"""Guard that resumes a stopped process if this process exits first, even after SIGKILL.

The guard is a small child process that waits on a pipe, which the kernel closes when this process exits. It refers to
the victim by pidfd, so it can never resume an unrelated process that has reused the ID.
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
    """Child process that resumes the victim if this process exits.

    Create it before the victim is stopped, and call `close` after the victim was resumed.
    """

    def __init__(self, pidfd: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(pidfd)],
            pass_fds=[pidfd],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # protects the guard from Ctrl-C
        )

    def close(self) -> None:
        """End the guard process without resuming the victim."""
        # Kill the guard before closing the pipe, because a closed pipe would make the guard resume the victim.
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
