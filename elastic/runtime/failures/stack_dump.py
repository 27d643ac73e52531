"""Signal handler that writes the Python stack of the signaled thread to the agent or to stderr.

The handler is C code that needs no interpreter lock, so it works in a deadlock, in an endless loop, and while a C call
holds the interpreter. It does not work in a stopped process. The agent signals each thread separately: if a handler
read the frames of other running threads, the process could crash.
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

_file: IO[str] | None = None  # kept open, because the handler writes to its descriptor


def answer() -> None:
    """Install the handler for the agent's signal. Idempotent. This function must be called from the training thread.

    If there is neither an agent nor stderr, the signal is ignored.
    """
    global _file
    if _file is not None:
        return
    pipe = sending.opened(os.environ)
    with contextlib.suppress(OSError):
        if pipe is not None:
            os.write(pipe, msgspec.json.encode(TrainingThread(threading.get_native_id())) + b"\n")
            _file = os.fdopen(pipe, "w")
        # Use a duplicate of the descriptor, because scripts and test runners replace sys.stderr and close it. A closed
        # descriptor may be reused, even for a socket of this package.
        elif not stat.S_ISSOCK(os.fstat(2).st_mode):
            _file = os.fdopen(os.dup(2), "w")
    number = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
    if _file is not None:
        faulthandler.register(number, file=_file, all_threads=False)
    else:
        # Ignore the signal: its default action would end the process.
        signal.signal(number, signal.SIG_IGN)
