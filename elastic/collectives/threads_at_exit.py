"""Threads that run torch code and must end before the interpreter exits.

An exiting interpreter terminates every thread that returns from C++ to Python. If that unwinds C++ frames, the process
aborts. The exiting thread therefore waits for these threads first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import threading
import time
from collections.abc import Callable
from typing import Any

# Part of the timeout of `finish`, in seconds, that is reserved for polling threads to end their waits.
_LEAVE_S = 0.2

_begun: set[threading.Thread] = set()
_lock = threading.Lock()
_leave_at: float | None = None


class ProcessExiting(BaseException):
    """Error raised in a thread when the exiting process stops waiting for the thread."""


def begin(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a thread for which `finish` waits at exit."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _lock:
        for ended in [each for each in _begun if not each.is_alive()]:
            _begun.remove(ended)
        thread.start()
        _begun.add(thread)
    return thread


def finish(timeout_s: float) -> bool:
    """Wait for all threads started by `begin`. Return whether all of them ended within the timeout."""
    global _leave_at
    until = time.monotonic() + timeout_s
    _leave_at = until - _LEAVE_S
    with _lock:
        begun = list(_begun)
    for thread in begun:
        thread.join(max(0.0, until - time.monotonic()))
    _leave_at = None
    return not any(thread.is_alive() for thread in begun)


def leave_behind(timeout_s: float) -> None:
    """Exit the process with its exit code even if some threads never end.

    C++ objects are not destroyed. If the interpreter does not finish in time, the process is ended with stack dumps and
    exit code 1.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
    with contextlib.suppress(AttributeError):  # Only glibc provides this function.
        c = ctypes.CDLL(None)
        c.on_exit(ctypes.cast(c._exit, ctypes.c_void_p), None)


def leave_if_ending() -> None:
    """Raise `ProcessExiting` in a polling thread after `finish` has waited for its time limit."""
    if _leave_at is not None and time.monotonic() >= _leave_at:
        raise ProcessExiting


class Completion:
    """Completion step of a collective: calls ``then`` exactly once to store the result.

    Waiting threads return after this call.
    """

    def __init__(self, then: Callable[[], object] | None) -> None:
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._then is not None:
                self._then()
                self._then = None
