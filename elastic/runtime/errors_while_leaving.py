"""Handling of errors in user code that occur because child processes exit while this worker is leaving.

Slurm, systemd and other process managers send SIGTERM to every process of a job. When a loader worker exits, its
training process raises an error. Such an error ends only the current world: this worker still holds the last commit,
and takes part in the last checkpoint or sends its commit to other workers.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.runtime.recovery import Phase, excuse_error
from elastic.runtime.session import Session

# Seconds to wait for a signal. Signals to all processes of a job usually arrive within milliseconds, but later on a
# busy host.
GRACE_S = 1.0
LOOK_S = 0.01


class Departure:
    """Detector of errors that occur because this worker is leaving. Only the training thread may use it.

    Args:
        session: this worker's session.
        waits: whether to wait after an error: the exit of a child process may be the first sign that this worker must
            leave or that the driver will request a last checkpoint.
    """

    def __init__(self, session: Session, *, waits: bool = True) -> None:
        self._session = session
        self.waits = waits
        # handler of SIGCHLD to restore; not None while the signal is ignored
        self._before: Any = None
        self._reaped = 0  # value of `_reaped()` when user code started

    def excuses_error(self) -> bool:
        """Return whether this worker may enter another world after an exception in user code.

        True only once per request to leave: the next exception ends the worker. SIGCHLD stays ignored until
        `watch_children`.
        """
        self.ignore_children()
        return self._ends_soon() and self._excused()

    def excuses_loss(self) -> bool:
        """Return whether a job of fixed size forms another world, for the last checkpoint, after a failed collective.

        The lost peer may have exited because it was already notified of the job's end. SIGCHLD stays ignored until
        `watch_children`.
        """
        self.ignore_children()
        session = self._session
        if session.env.elastic or session.alone:
            return False  # in these jobs, the loss of a worker does not raise CollectiveFailed
        if self.waits:
            self._wait_until(lambda: session.recovers)
        return session.recovers

    def ignore_children(self) -> None:
        """Disable the handler of SIGCHLD until `watch_children`, because user code has ended.

        torch's handler raises an exception for each exited loader worker, at an arbitrary point of the training thread.
        """
        try:
            self._ignore_children()
        except Exception:  # raised by the handler, for another child process
            self._ignore_children()

    def watch_children(self) -> None:
        """Enable the handler of SIGCHLD again, before user code runs."""
        self._reaped = _reaped()
        if self._before is not None:
            signal.signal(signal.SIGCHLD, self._before)
            self._before = None

    def _ignore_children(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs signal handlers only in the main thread.
        if callable(handler := signal.getsignal(signal.SIGCHLD)):
            self._before = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _had_children(self) -> bool:
        """Return whether user code had child processes, including those that have been reaped.

        The error may have destroyed the loader, which then has already reaped its workers.
        """
        return _has_children() or _reaped() != self._reaped

    def _excused(self) -> bool:
        with self._session.lock:
            return excuse_error(self._session.recovery)

    def _ends_soon(self) -> bool:
        """Return whether this worker or its job is about to end.

        If there were child processes, wait briefly for a sign of the end.
        """
        session = self._session
        if (
            session.alone
            or session.recovery.ending.near
            or not self.waits
            or not self._had_children()
        ):
            return not session.alone and session.recovery.ending.near
        self._wait_until(lambda: session.recovery.ending.near)
        return session.recovery.ending.near

    def _wait_until(self, known: Callable[[], bool]) -> None:
        deadline, session = time.monotonic() + GRACE_S, self._session
        with session.changed:
            while (
                not known()
                and session.recovery.phase is not Phase.OVER
                and (left := deadline - time.monotonic()) > 0
            ):
                # Wait in short intervals: a signal that another thread receives does not end the wait, but its handler
                # runs in this thread.
                session.changed.wait(min(left, LOOK_S))


def _reaped() -> int:
    """Return a number that increases with every reaped child process."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _has_children() -> bool:
    """Return whether this process has children, running or not yet reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
