"""Reports to the driver about the training function under `elastic.run`: its start, return, errors and exit."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator

from elastic.errors import PeerLost
from elastic.monitoring import data_waits, timeline
from elastic.protocol.calls import Called
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.recovery import Phase, Recovery
from elastic.runtime.session import Session

DRAIN_S = 1.0  # timeout in seconds for aborted collectives to end, which usually takes milliseconds


class Training:
    """Reports to the driver about one worker's training. All methods must be called from the training thread."""

    def __init__(self, session: Session, progress: ProgressCounter) -> None:
        self._session = session
        self._progress = progress
        self.in_user_code = False  # whether the training function is running
        self._entered = False
        self._trains_in: int | None = None  # ID of the thread that is inside elastic.run

    @property
    def over(self) -> bool:
        """Return whether the job's training has succeeded.

        Afterwards, no worker joins, and a loss is not recovered from.
        """
        return not self._session.alone and self._session.recovery.finished

    def enter(self) -> None:
        """Record that ``elastic.run`` begins."""
        with self._session.lock:
            self._session.recovery.enter()
        self._session.account.begin("joining", time.monotonic())
        if not self._entered:
            # In a job of fixed size, the time since init() was counted as training until now.
            self._session.account.only_prepared()
        self._entered = True
        data_waits.count(self._session.account)
        self._trains_in = threading.get_ident()

    def leave(self) -> None:
        """Record that ``elastic.run`` has ended."""
        with self._session.lock:
            self._session.recovery.leave()
        self._session.account.begin("idle", time.monotonic())
        data_waits.stop()
        self._trains_in = None

    def begins(self) -> None:
        """Record that the training function is about to be called.

        At this time all ranks have the same state, so no step would be repeated after a failure.
        """
        now = time.monotonic()
        self._session.account.begin("training", now)
        self._session.account.committed(now)
        self.in_user_code = True

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context manager for a second or later training in the job, whose time counts as training."""
        account = self._session.account
        with self._session.lock:
            self._session.recovery.train_again()
        account.begin("training", time.monotonic())
        data_waits.count(account)
        try:
            yield
        finally:
            with self._session.lock:
                self._session.recovery.trained_again()
            data_waits.stop()
            account.begin("idle", time.monotonic())

    def returned(self) -> None:
        """Report that the training function has returned, and wait until it has returned on all other workers.

        Raises:
            PeerLost: a worker was lost before it returned.
        """
        session = self._session
        self.in_user_code = False
        session.account.begin("idle", time.monotonic())
        if session.alone:
            return
        session.update(Recovery.returned)
        session.wait_while(Phase.RETURNED, "to report that all have returned")
        phase = session.recovery.phase
        if phase is Phase.BROKEN:
            raise PeerLost(session.recovery.reason)
        if phase is Phase.OVER:
            session.raise_over()

    def raised(
        self, summary: str, traceback: str, hardware: bool = False, calls: tuple[Called, ...] = ()
    ) -> None:
        """Report the exception with which this process is about to exit.

        Args:
            summary: the exception in one line.
            traceback: traceback of the exception.
            hardware: see `failures.hardware_errors`.
            calls: the ranks' differing calls, if they are the cause.
        """
        if not self._session.alone:
            self._session.update(
                lambda recovery: recovery.raised(summary, traceback, hardware, calls=calls)
            )

    def cannot_begin(self, why: str) -> None:
        """Report to the driver why training cannot begin on any worker."""
        self._session.update(lambda recovery: recovery.raised(why, "", final=True))

    def lost_shards(self, why: str) -> None:
        """Report that the job cannot continue, because some shards of its state are not held by any worker."""
        self._session.update(
            lambda recovery: recovery.raised(why, "", final=True, shards_lost=True)
        )

    def refused(self, why: str) -> None:
        """Report that the job must end because of a mistake in the script."""
        if not self._session.alone:
            self._session.update(lambda recovery: recovery.raised(why, "", final=True, code=2))

    def quits(self, code: object) -> bool:
        """Report that this process is about to exit because of ``SystemExit(code)``.

        An interpreter with torch takes seconds to exit, and its sockets stay open until then. With the report, the
        other workers need not wait for the exit.

        Returns:
            False if the code is an error message, as in ``sys.exit("no data")``, which counts as an exception.
        """
        if not self._session.recovers:
            return True  # in a static job, the exit code alone determines success or failure
        if code is not None and not isinstance(code, int):
            return False
        self._session.update(lambda recovery: recovery.quit((code or 0) & 0xFF))
        return True

    def turned_away(self) -> None:
        """Report that this process is about to exit, because its state does not match that of the world."""
        if self._session.recovers:
            self._session.update(lambda recovery: recovery.quit(1, ""))

    def gave_up(self, reason: str) -> None:
        """Report that this world has failed, because user code raised HorovodInternalError.

        All workers then form another.
        """
        self._session.mark_broken(self._session.recovery.generation, reason)

    def interrupted(self, *, planned: bool = False) -> None:
        """Record that the training thread has returned to ``elastic.run``.

        Args:
            planned: whether the reason is a planned change of the world, in which no step is lost.
        """
        self.in_user_code = False
        now = time.monotonic()
        self._session.phases.raised(now)
        if planned:
            self._session.account.begin("joining", now)
        else:
            self._session.account.begin("recovering", now, self._session.phases.broken_at())
        if timeline.on:
            timeline.end_all()

    def drain(self) -> None:
        """Wait, after a loss, until no collective of the old world can write to a tensor.

        Raises:
            DeviceLost: a GPU did not end its work in time.
        """
        for _ in range(self._session.groups.drain(DRAIN_S)):
            warnings.warn(
                f"a collective of generation {self._session.recovery.generation} was still running {DRAIN_S:g} s"
                " after it was aborted",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def long_phase(self, name: str) -> Iterator[None]:
        """Mark a period in which the other workers wait for this one. See `elastic.long_phase`."""
        if self._trains_in not in (None, threading.get_ident()):
            warnings.warn(
                f"long_phase({name!r}) has no effect in this thread: call it in the training thread",
                stacklevel=4,
            )
            yield
            return
        recovery = self._session.recovery
        before, message = self._progress.begin_phase(name, recovery.generation)
        self._session.send(message)
        try:
            yield
        finally:
            self._session.send(self._progress.end_phase(before, recovery.generation))
