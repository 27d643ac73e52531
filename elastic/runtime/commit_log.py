"""Log of a worker's commits: numbers them, detects interrupted steps, and handles safepoints and rollbacks.

The state holds the values. This module tracks which commit the values belong to, and whether other workers can continue
from it. In an uninterrupted step, `State.commit` calls `may_commit`, saves the values, and calls `committed` and
`check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic.errors import PeerLost, WorldChanging
from elastic.failpoints import failpoint
from elastic.monitoring import timeline
from elastic.protocol import messages
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.recovery import Verdict
from elastic.runtime.session import Session

HOLD_S = (
    # maximum time in seconds to wait for the driver at a safepoint; the driver cancels a change much earlier
    60.0
)


class CommittedState(Protocol):
    """Operations on a state that `CommitLog` needs."""

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def valid(self) -> bool: ...

    def report_commit(self) -> None: ...

    def keep_older(self, commit: messages.Commit) -> None: ...

    def go_back(self, commit: messages.Commit, *, restores: bool) -> None: ...

    def commits_together(self) -> bool: ...

    def finish_commit(self) -> None: ...


class DurableWriter(Protocol):
    """Methods of the checkpoint writer that `CommitLog` uses. See `elastic.checkpoints.background_writer`."""

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
    """Log of one worker's commits. All methods must be called from the training thread."""

    def __init__(self, session: Session, progress: ProgressCounter) -> None:
        self._session = session
        self._progress = progress
        self.made = 0  # number of commits in all worlds so far
        # writer of checkpoints; not None iff inside elastic.run with checkpoints enabled
        self.durable: DurableWriter | None = None

    # ---- commit() ------------------------------------------------------------------------------------------------

    def may_commit(self) -> None:
        """Raise the world's error again if user code has caught it: an interrupted step must not be committed."""
        self._session.raise_if_ended()

    def committed(self) -> None:
        """Record that the state was saved."""
        self.made += 1
        with self._session.lock:
            self._session.recovery.committed()
        if self.durable is not None:
            self.durable.saved()

    def keep_older(self, state: CommittedState) -> None:
        """Keep a copy of the newest commit that stays available after later commits.

        This method does nothing for a state that keeps no older commits.
        """
        commit = self._session.recovery.agreed()
        if commit is not None:
            state.keep_older(commit)

    def sealed(self, commit: messages.Commit) -> None:
        """Record that all ranks have copied and mirrored a commit of a sharded state."""
        with self._session.lock:
            self._session.recovery.seal(commit)

    def stop_with(self, group: str) -> None:
        """Make this worker stop for planned changes at the same safepoint as the workers of its group only.

        This method is used by workers that wait for some workers in every step, but not for the others, and therefore
        reach safepoints of the same number at other times than these.

        Args:
            group: name of the group, equal on its workers, or "" for all members.
        """
        with self._session.lock:
            self._session.recovery.stop_group = group

    def make_durable(self, state: Any) -> None:
        """Write the newest commit to storage if a checkpoint is due."""
        if self.durable is None:
            return
        recovery = self._session.recovery
        commit = recovery.agreed()
        if commit is not None:
            self.durable.committed(state, commit, recovery.place)

    def finish(self, state: Any) -> None:
        """Make the last commit durable after training, unless the world fails first."""
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
        """Report the digest of the newest commit to the driver.

        Args:
            digest: digest of the parameters.
            buffers: digest of the buffers.
            samples: IDs of the samples that this rank has trained on since its previous commit, for tests.
            epoch, step, tensors, gradients: see `elastic.protocol.messages.Digested`.
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
        """Count a safepoint. This method usually returns without waiting.

        Raises:
            WorldChanging: all workers stop at this safepoint for a planned change.
            PeerLost: the world failed.
            LeaveRequested: this worker must leave the job.
        """
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
                raise WorldChanging("the world changes: let elastic.run handle this exception")
            case Verdict.BROKEN:
                raise PeerLost(session.recovery.reason)
            case Verdict.OVER:
                session.raise_over()

    def _hold(self) -> Verdict:
        """Wait until the driver announces the safepoint at which all workers stop, or cancels the change."""
        session, deadline = self._session, time.monotonic() + HOLD_S
        with session.changed:
            while (verdict := session.recovery.verdict()) is Verdict.HOLD:
                if not session.changed.wait(deadline - time.monotonic()):
                    session.recovery.release()
        return verdict

    # ---- changes of the world ------------------------------------------------------------------------------------

    def keep(self, state: CommittedState) -> None:
        """Save the state as the commit of the safepoint at which all workers have stopped."""
        state.save()
        state.finish_commit()
        self.committed()
        state.report_commit()
        now = time.monotonic()
        self._session.account.committed(now)
        self._session.phases.restored(now)

    def keep_own(self, state: CommittedState) -> bool:
        """Save the current state when user code has requested a new world.

        If the world has failed, nothing is saved, because a step may be incomplete.

        Returns:
            Whether the state was saved. If so, call `committed_alone` after leaving the world. If not, the previous
            commit remains the newest.
        """
        if self._session.broken or state.commits_together():
            return False
        state.save()
        return state.valid()

    def committed_alone(self) -> None:
        """Count the commit of `keep_own`, after this worker has left the world. See `Recovery`."""
        with self._session.lock:
            self._session.recovery.committed_alone()
        if self.durable is not None:
            self.durable.saved()
        self._session.account.committed(time.monotonic())

    def step_back(self, state: CommittedState) -> None:
        """Restore the newest complete commit.

        An incomplete one is discarded, because no worker can continue from it.
        """
        if not state.valid():
            with self._session.lock:
                self._session.recovery.discard_commit()
        with timeline.during("state", "restore"):
            state.restore()
        if self.durable is not None:
            self.durable.stepped_back()
        self._session.account.stepped_back()
        self._session.phases.restored(time.monotonic())

    def went_back(self, state: CommittedState) -> bool:
        """Restore an older commit if the world begins from one. Return whether it does.

        A world does so if newer commits may contain wrong gradients; see `elastic.exact.verifier`.
        """
        recovery = self._session.recovery
        world, commit = recovery.world, recovery.goes_back()
        if world is None or commit is None:
            return False
        restores = world.place.rank < world.holders
        state.go_back(commit, restores=restores)
        if restores:
            with self._session.lock:
                recovery.went_back(commit)
        if self.durable is not None:
            self.durable.stepped_back()
        return True

    def adopt(
        self,
        copied_bytes: int,
        *,
        from_checkpoint: bool = False,
        shards: messages.ShardsPlaced | None = None,
    ) -> None:
        """Begin a world in which the states of all members are equal. No later rollback goes back further than this.

        Args:
            copied_bytes: number of bytes of the state that this worker received.
            from_checkpoint, shards: see `elastic.protocol.messages.Resumed`.
        """
        with self._session.lock:
            generation = self._session.recovery.adopt().generation
        if self.durable is not None:
            self.durable.world_over(generation)
        self._progress.begin_training()
        self._session.phases.copied_bytes = copied_bytes
        self._session.phases.from_checkpoint = from_checkpoint
        self._session.phases.shards = shards
        self._session.phases.mark("synced", time.monotonic())
