"""What `elastic.run` says of the training function: it begins, has returned, has raised, is over. Acts."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator

from elastic.errors import PeerLost
from elastic.monitoring import data_waits, timeline
from elastic.protocol.calls import Called
from elastic.runtime.progress import ProgressCounter
from elastic.runtime.recovery import Phase, Recovery
from elastic.runtime.session import Session

DRAIN_S = 1.0  # for aborted collectives to end; they take milliseconds


class Training:
    """One worker's. Methods are for the training thread."""

    def __init__(self, session: Session, progress: ProgressCounter) -> None:
        self._session = session
        self._progress = progress
        self.in_user_code = False  # in the training function itself
        self._entered = False
        self._trains_in: int | None = None  # the thread that is in elastic.run

    @property
    def over(self) -> bool:
        """Whether the job's training has ended with success: nobody joins any more, and a loss is for good."""
        return not self._session.alone and self._session.recovery.finished

    def enter(self) -> None:
        """``elastic.run`` begins."""
        with self._session.lock:
            self._session.recovery.enter()
        self._session.account.begin("joining", time.monotonic())
        if not self._entered:
            # In a job of a fixed size all that follows init() has counted as training.
            self._session.account.only_prepared()
        self._entered = True
        data_waits.count(self._session.account)
        self._trains_in = threading.get_ident()

    def leave(self) -> None:
        """``elastic.run`` is over."""
        with self._session.lock:
            self._session.recovery.leave()
        self._session.account.begin("idle", time.monotonic())
        data_waits.stop()
        self._trains_in = None

    def begins(self) -> None:
        """The training function is called: the state is equal everywhere, and nothing is to be done again."""
        now = time.monotonic()
        self._session.account.begin("training", now)
        self._session.account.committed(now)
        self.in_user_code = True

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A training after the job's: its time counts as training."""
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
        """Says that the function returned; waits for the others. Raises PeerLost if one of them is lost first."""
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
        """Tells the driver why this process is about to end. ``hardware``: see `failures.hardware_errors`. ``calls``:
        of ranks, which do not fit together.
        """
        if not self._session.alone:
            self._session.update(
                lambda recovery: recovery.raised(summary, traceback, hardware, calls=calls)
            )

    def cannot_begin(self, why: str) -> None:
        """Tells the driver that the job can't go on, with this worker or with any other, and why."""
        self._session.update(lambda recovery: recovery.raised(why, "", final=True))

    def lost_shards(self, why: str) -> None:
        """Tells the driver that the job can't go on, because no worker holds some shards of its state any more."""
        self._session.update(
            lambda recovery: recovery.raised(why, "", final=True, shards_lost=True)
        )

    def refused(self, why: str) -> None:
        """Tells the driver that the job is to end, because the script is wrong."""
        if not self._session.alone:
            self._session.update(lambda recovery: recovery.raised(why, "", final=True, code=2))

    def quits(self, code: object) -> bool:
        """Tells the driver that this process is about to exit, for ``SystemExit(code)``. The end of an interpreter with
        torch in it takes seconds, and its sockets stay open for as long; the others need not wait for that.

        Returns False for a code that is an error message, as in ``sys.exit("no data")``: that is an exception.
        """
        if not self._session.recovers:
            return True  # in a static job the exit itself is the verdict
        if code is not None and not isinstance(code, int):
            return False
        self._session.update(lambda recovery: recovery.quit((code or 0) & 0xFF))
        return True

    def turned_away(self) -> None:
        """Tells the driver that this process is about to exit, because its state does not match that of its world."""
        if self._session.recovers:
            self._session.update(lambda recovery: recovery.quit(1, ""))

    def gave_up(self, reason: str) -> None:
        """User code gave this world up (it raised HorovodInternalError): regroup with everybody."""
        self._session.mark_broken(self._session.recovery.generation, reason)

    def interrupted(self, *, planned: bool = False) -> None:
        """The training thread has come back to ``elastic.run``. ``planned``: the world changes, and nothing is lost."""
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
        """After a loss: waits until no collective of the old world writes into any tensor. Raises DeviceLost."""
        for _ in range(self._session.groups.drain(DRAIN_S)):
            warnings.warn(
                f"a collective of generation {self._session.recovery.generation} still ran {DRAIN_S:g} s after"
                " it was aborted",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def long_phase(self, name: str) -> Iterator[None]:
        """See `elastic.long_phase`."""
        if self._trains_in not in (None, threading.get_ident()):
            warnings.warn(
                f"long_phase({name!r}) has no effect here: it applies to the training thread",
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
