"""Threads that are in torch's code. Acts.

The interpreter, at its end, ends every thread that comes back to it from C++. Where that unwinds frames of C++, the
whole process is aborted. So whoever ends the process waits for these first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import threading
import time
from collections.abc import Callable
from typing import Any

_LEAVE_S = 0.2  # of the time that `finish` has, for threads to leave what they wait for

_begun: set[threading.Thread] = set()
_lock = threading.Lock()
_leave_at: float | None = None


class Ending(BaseException):
    """The process ends, and whoever ends it has waited long enough for this thread."""


def begin(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Starts one, which `finish` waits for."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with _lock:
        for ended in [each for each in _begun if not each.is_alive()]:
            _begun.remove(ended)
        thread.start()
        _begun.add(thread)
    return thread


def finish(timeout_s: float) -> bool:
    """Whether all ended within that time."""
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
    """Some of them never end. The process does nevertheless, with the exit code that it has: nothing of C++ is taken
    down around them, and should the interpreter not come to its end in time, it is ended, with their stacks and code 1.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
    with contextlib.suppress(AttributeError):  # glibc has it
        c = ctypes.CDLL(None)
        c.on_exit(ctypes.cast(c._exit, ctypes.c_void_p), None)


def leave_if_ending() -> None:
    """For a thread that waits in slices: raises `Ending` once `finish` has waited for long."""
    if _leave_at is not None and time.monotonic() >= _leave_at:
        raise Ending


class Completion:
    """``then`` puts a collective's result in place: once, and no thread that waits for it is back before."""

    def __init__(self, then: Callable[[], object] | None) -> None:
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._then is not None:
                self._then()
                self._then = None
