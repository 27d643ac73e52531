"""Sends the Python stacks of all threads to the agent at a signal of its; to stderr if it can't. Decides nothing.

The handler is C code that needs no lock of the interpreter, so it answers in a deadlock, in an endless loop, and while
a call into C holds the interpreter. A process that is stopped can't answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
import threading
from typing import IO

import msgspec

from elastic.protocol.messages import STACKS_SIGNAL_OFFSET
from elastic.protocol.uncaught import sending
from elastic.protocol.uncaught.sending import TrainingThread

_file: IO[str] | None = None  # kept open: the handler writes to its descriptor


def answer() -> None:
    """From now on the signal is answered. Safe to repeat; without agent and stderr nothing is written. To be called in
    the thread that trains.
    """
    global _file
    if _file is not None:
        return
    pipe = sending.opened(os.environ)
    with contextlib.suppress(OSError):
        if pipe is not None:
            os.write(pipe, msgspec.json.encode(TrainingThread(threading.get_ident())) + b"\n")
            _file = os.fdopen(pipe, "w")
        # A descriptor of its own: scripts and test runners replace sys.stderr, and close it. One that was closed
        # before may be anything by now, a socket of ours at worst.
        elif not stat.S_ISSOCK(os.fstat(2).st_mode):
            _file = os.fdopen(os.dup(2), "w")
    number = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
    if _file is not None:
        faulthandler.register(number, file=_file, all_threads=True)
    else:
        signal.signal(number, signal.SIG_IGN)  # by default it would end the process
