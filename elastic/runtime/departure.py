"""Handling of errors in user code that result from exiting child processes while this worker leaves.

Slurm, systemd and other process managers send SIGTERM to every process of a job. A loader worker that exits causes an
error in its training process. Such an error ends only the current world: this worker still holds the last commit, and
takes part in the last checkpoint or sends its commit to other workers.
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

# Seconds to wait for a signal: signals to all processes of a job arrive within milliseconds, later on a busy host.
GRACE_S = 1.0
LOOK_S = 0.01


class Departure:
    """Record of whether a worker leaves during a training run. Must be called from the training thread.

    Args:
        session: session of this worker.
        waits: whether the exit of a child process may be the first sign that this worker is about to leave, or that a
            last checkpoint will be requested.
    """

    def __init__(self, session: Session, *, waits: bool = True) -> None:
        self._session = session
        self.waits = waits
        self._before: Any = None  # previous handler of SIGCHLD while the signal is ignored
        self._reaped = 0  # value of `_reaped` when user code started

    def excuses_error(self) -> bool:
        """Return whether this worker may be in another world after an error of user code.

        True only once per request to leave. The next error is raised. Children remain ignored until `watch_children`.
        """
        self.ignore_children()
        return self._ends_soon() and self._excused()

    def excuses_loss(self) -> bool:
        """Return whether another world, for the last checkpoint, follows a failed collective in a job of fixed size.

        The lost peer may already have been notified of the job's end. Children remain ignored until `watch_children`.
        """
        self.ignore_children()
        session = self._session
        if session.env.elastic or session.alone:
            return False  # in these jobs, a lost worker does not raise CollectiveFailed
        if self.waits:
            self._wait_until(lambda: session.recovers)
        return session.recovers

    def ignore_children(self) -> None:
        """Disable handlers of SIGCHLD until `watch_children`, since user code has ended.

        torch's handler raises once for each exited loader worker, at any point of the training thread.
        """
        try:
            self._ignore_children()
        except Exception:  # raised by the handler for another child process
            self._ignore_children()

    def watch_children(self) -> None:
        """Enable handlers of SIGCHLD again before user code runs."""
        self._reaped = _reaped()
        if self._before is not None:
            signal.signal(signal.SIGCHLD, self._before)
            self._before = None

    def _ignore_children(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signal handlers run only in the main thread
        if callable(handler := signal.getsignal(signal.SIGCHLD)):
            self._before = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _had_children(self) -> bool:
        """Return whether user code had child processes.

        A loader that was destroyed with the error has already reaped its workers.
        """
        return _has_children() or _reaped() != self._reaped

    def _excused(self) -> bool:
        with self._session.lock:
            return excuse_error(self._session.recovery)

    def _ends_soon(self) -> bool:
        """Return whether this worker or its job is about to end. Waits briefly if a child process has exited."""
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
                # Wait in short intervals: a signal received by another thread does not end the wait, but its handler
                # runs in this thread.
                session.changed.wait(min(left, LOOK_S))


def _reaped() -> int:
    """Return a measure that increases with each reaped child process."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _has_children() -> bool:
    """Return whether there are child processes, running or not yet reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
