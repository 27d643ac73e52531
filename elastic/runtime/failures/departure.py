"""An error of user code in a worker that is leaving may be of its child processes, which got SIGTERM with it. Acts.

Slurm, systemd and other process managers signal every process of a job. A loader worker dies of that, and its training
process raises. That error is one of the present world: this worker still holds the last commit, and takes part in the
last checkpoint, or hands its commit over.
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

# Signals that are sent to all processes of a job reach them within milliseconds, in any order.
GRACE_S = 0.3
LOOK_S = 0.01


class Departure:
    """One training's. For the training thread. ``waits``: whether the end of a child process may be the first sign of
    this worker's end, or of a last checkpoint.
    """

    def __init__(self, session: Session, *, waits: bool = True) -> None:
        self._session = session
        self.waits = waits
        self._before: Any = None  # the handler of SIGCHLD while that is ignored
        self._reaped = 0  # when user code began; see `_reaped`

    def excuses_error(self) -> bool:
        """User code has raised: whether another world may follow, in which this worker takes part.

        Once for a request to leave; the next error is raised. Children stay ignored until `watch_children`.
        """
        self.ignore_children()
        return self._ends_soon() and self._excused()

    def excuses_loss(self) -> bool:
        """A collective has failed in a job of a fixed size: whether another world follows, for the last checkpoint.

        The peer that is gone may know of the job's end already. Children stay ignored until `watch_children`.
        """
        self.ignore_children()
        session = self._session
        if session.env.elastic or session.alone:
            return False  # a loss is not a CollectiveFailed there
        if self.waits:
            self._wait_until(lambda: session.recovers)
        return session.recovers

    def ignore_children(self) -> None:
        """User code has ended: no handler of SIGCHLD runs until `watch_children`. torch's raises once for each loader
        worker that has died, wherever the training thread is.
        """
        try:
            self._ignore_children()
        except Exception:  # the handler's, for another one
            self._ignore_children()

    def watch_children(self) -> None:
        """User code runs from here on."""
        self._reaped = _reaped()
        if self._before is not None:
            signal.signal(signal.SIGCHLD, self._before)
            self._before = None

    def _ignore_children(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # handlers run in the main thread
        if callable(handler := signal.getsignal(signal.SIGCHLD)):
            self._before = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _had_children(self) -> bool:
        """A loader that goes out of scope with the error has waited for its workers by now."""
        return _has_children() or _reaped() != self._reaped

    def _excused(self) -> bool:
        with self._session.lock:
            return excuse_error(self._session.recovery)

    def _ends_soon(self) -> bool:
        """Whether this worker or the job is about to end, now or a moment after one of its child processes."""
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
        """For `GRACE_S` at most."""
        deadline, session = time.monotonic() + GRACE_S, self._session
        with session.changed:
            while (
                not known()
                and session.recovery.phase is not Phase.OVER
                and (left := deadline - time.monotonic()) > 0
            ):
                # In slices: a signal that another thread has received does not end this wait, and its handler runs
                # in this thread.
                session.changed.wait(min(left, LOOK_S))


def _reaped() -> int:
    """Grows with each child process that was waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _has_children() -> bool:
    """Live ones, and dead ones that were not waited for yet."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
