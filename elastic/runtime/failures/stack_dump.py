"""Writes the Python stacks of all threads to stderr when the agent sends a signal. Decides nothing.

The handler is C code that needs no lock of the interpreter, so it answers in a deadlock, in an endless loop, and while
a call into C holds the interpreter. A process that is stopped can't answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
from typing import IO

from elastic.protocol.messages import STACKS_SIGNAL_OFFSET

_file: IO[str] | None = None  # kept open: the handler writes to its descriptor


def answer() -> None:
    """From now on the signal is answered. Safe to repeat; without stderr nothing is written."""
    global _file
    if _file is not None:
        return
    with contextlib.suppress(OSError):
        # A descriptor of its own: scripts and test runners replace sys.stderr, and close it. One that was closed
        # before may be anything by now, a socket of ours at worst.
        if not stat.S_ISSOCK(os.fstat(2).st_mode):
            _file = os.fdopen(os.dup(2), "w")
    number = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
    if _file is not None:
        faulthandler.register(number, file=_file, all_threads=True)
    else:
        signal.signal(number, signal.SIG_IGN)  # by default it would end the process
