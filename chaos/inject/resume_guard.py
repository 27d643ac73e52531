"""Continues a stopped process if we end without having done so, by SIGKILL too. Stops nothing, and decides nothing.

A small process of its own waits on a pipe that the kernel closes when we are gone. It holds the victim by the pidfd
that it was given, so that it can never continue somebody else.
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
    """Begins at once, before its victim is stopped. `close` it when that goes on."""

    def __init__(self, pidfd: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(pidfd)],
            pass_fds=[pidfd],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is not for it
        )

    def close(self) -> None:
        """It has nothing more to do."""
        self._process.kill()  # first: the end of its pipe would make it act
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
