"""What a commit goes through: may it be made, what number it has, is the world to change, the way back to it. Acts.

A state keeps the values. Which commit they are, and whether others may go on from them, is kept here. In a step that
nobody interrupts, `State.commit` calls `may_commit`, saves, and calls `committed` and `check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic.errors import PeerLost, WorldChanging
from elastic.failpoints import failpoint
from elastic.monitoring import timeline
from elastic.protocol import messages
from elastic.runtime.progress import ProgressCounter
from elastic.runtime.recovery import Verdict
from elastic.runtime.session import Session

HOLD_S = 60.0  # at a check, for the driver's word; it withdraws a change itself long before


class Kept(Protocol):
    """What is asked of a state here."""

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def valid(self) -> bool: ...

    def report_commit(self) -> None: ...

    def is_sharded(self) -> bool: ...


class Durable(Protocol):
    """Writes commits to a storage; see `elastic.checkpoints.writer`."""

    run: int

    def saved(self) -> None: ...

    def stepped_back(self) -> None: ...

    def committed(self, state: Any, commit: messages.Commit, place: messages.Place) -> None: ...

    def returned(
        self, commit: messages.Commit, place: messages.Place, incarnation: int
    ) -> None: ...

    def world_over(self, generation: int) -> None: ...

    def finish(
        self, state: Any, commit: messages.Commit, place: messages.Place, over: Callable[[], bool]
    ) -> None: ...

    def want(self) -> None: ...

    @property
    def newest(self) -> messages.Commit | None: ...


class CommitLog:
    """One worker's. Methods are for the training thread."""

    def __init__(self, session: Session, progress: ProgressCounter) -> None:
        self._session = session
        self._progress = progress
        self.made = 0  # commits, in all worlds
        self.durable: Durable | None = None  # inside elastic.run, where checkpoints are written

    # ---- commit() ------------------------------------------------------------------------------------------------

    def may_commit(self) -> None:
        """Raises what user code was told before in this world, and has caught: its step was cut short."""
        self._session.raise_if_told()

    def committed(self) -> None:
        """A state was saved."""
        self.made += 1
        with self._session.lock:
            self._session.recovery.committed()
        if self.durable is not None:
            self.durable.saved()

    def make_durable(self, state: Any) -> None:
        """The commit that was just made may be one that goes to the storage."""
        if self.durable is None:
            return
        recovery = self._session.recovery
        commit = recovery.agreed()
        if commit is not None:
            self.durable.committed(state, commit, recovery.place)

    def finish(self, state: Any) -> None:
        """No commit follows: the last one is made durable, unless the world breaks meanwhile."""
        recovery, session = self._session.recovery, self._session
        commit = recovery.agreed()
        if self.durable is not None and commit is not None:
            self.durable.finish(state, commit, recovery.place, lambda: session.broken)

    def report_digest(
        self,
        digest: int,
        buffers: int,
        samples: Sequence[int] = (),
        epoch: int = 0,
        step: int = -1,
        tensors: Mapping[str, int] | None = None,
        gradients: Mapping[str, int] | None = None,
    ) -> None:
        """Of the newest commit. ``samples``: ids that this rank has trained on since its last one, in tests. The others
        as in `elastic.protocol.messages.Digested`.
        """
        recovery = self._session.recovery
        commit = recovery.newest
        if commit is not None and digest and recovery.running:
            where = recovery.generation, commit
            digests = dict(tensors or {}), dict(gradients or {})
            self._session.send(
                messages.Digested(*where, digest, buffers, list(samples), epoch, step, *digests)
            )

    def check(self) -> None:
        """One numbered check. Raises WorldChanging, PeerLost or LeaveRequested; usually returns at once."""
        session = self._session
        if session.alone or not session.recovery.running:
            return
        with session.lock:
            verdict = session.recovery.arrive()
        if verdict in (Verdict.HOLD, Verdict.STOP):
            failpoint("hold")
            verdict = self._hold()
            if verdict is Verdict.STOP:
                failpoint("stop")
        if session.recovery.place.size == 1:
            session.resumed()
        match verdict:
            case Verdict.STOP:
                session.phases.mark("broken", time.monotonic())
                raise WorldChanging("a planned change of the world")
            case Verdict.BROKEN:
                raise PeerLost(session.recovery.reason)
            case Verdict.OVER:
                session.raise_over()

    def _hold(self) -> Verdict:
        """Until the driver has said where to stop, or that all go on."""
        session, deadline = self._session, time.monotonic() + HOLD_S
        with session.changed:
            while (verdict := session.recovery.verdict()) is Verdict.HOLD:
                if not session.changed.wait(deadline - time.monotonic()):
                    session.recovery.release()
        return verdict

    # ---- between two worlds --------------------------------------------------------------------------------------

    def keep(self, state: Kept) -> None:
        """All have stopped at one check: the state as it is is the commit of that check."""
        state.save()
        self.committed()
        state.report_commit()
        now = time.monotonic()
        self._session.account.committed(now)
        self._session.phases.restored(now)

    def keep_own(self, state: Kept) -> bool:
        """User code asks for a new world with the state as it is: saves it, unless the world broke before, and with it
        perhaps a step. Returns whether there is such a commit, which is for `committed_alone` to count; if not, the one
        before counts.
        """
        if self._session.broken or state.is_sharded():
            return False
        state.save()
        return state.valid()

    def committed_alone(self) -> None:
        """What `keep_own` has saved counts, now that the world is given up; see `Recovery`."""
        with self._session.lock:
            self._session.recovery.committed_alone()
        if self.durable is not None:
            self.durable.saved()
        self._session.account.committed(time.monotonic())

    def step_back(self, state: Kept) -> None:
        """To the newest commit. One that is torn is forgotten: nobody could go on from it."""
        if not state.valid():
            with self._session.lock:
                self._session.recovery.discard_commit()
        with timeline.during("state", "restore"):
            state.restore()
        if self.durable is not None:
            self.durable.stepped_back()
        self._session.account.stepped_back()
        self._session.phases.restored(time.monotonic())

    def adopt(self, copied_bytes: int, *, from_checkpoint: bool = False) -> None:
        """State is equal everywhere: from here a loss rolls back to this point, not further. ``from_checkpoint``: see
        `elastic.protocol.messages.Resumed`.
        """
        with self._session.lock:
            generation = self._session.recovery.adopt().generation
        if self.durable is not None:
            self.durable.world_over(generation)
        self._progress.begin_training()
        self._session.phases.copied_bytes = copied_bytes
        self._session.phases.from_checkpoint = from_checkpoint
        self._session.phases.mark("synced", time.monotonic())
