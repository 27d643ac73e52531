"""Background writer that stores one worker's in-memory commits as checkpoints.

The training thread only marks the buffer of a commit as in use, so that later commits are copied to another buffer. A
background thread writes this rank's share, retries while the storage fails, and reports completion. After the driver
has received the reports of all ranks, rank 0 writes the index and the manifest. A storage failure never fails a step;
it only delays the next checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from elastic.checkpoints import catalog, commit_files, finished_training, storage_retries
from elastic.checkpoints.files.manifest import CommitName, Share, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.schedule import Schedule
from elastic.errors import DeviceLost
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.protocol import messages
from elastic.protocol.file_times import process_began_at
from elastic.protocol.messages import Commit, Message, Place
from elastic.state.handlers.held_commit import HeldCommit
from elastic.state.state import ObjectState, hold, prepare_hold

FINISH_S = 60.0  # timeout in seconds for writing the last commit of a training run
LOOK_S = 0.1  # interval in seconds at which a wait checks whether the world has failed
NICE = 19  # niceness of the writing thread
REPEAT_S = 5.0  # seconds after which an unanswered message to the driver is repeated
NAMED = 3  # maximum number of parameters that a message names
# Number of generations of a job that has lost no worker: one for init() and one for the training.
FIRST_GENERATIONS = 2
CLOSE_S = 2.0  # time limit in seconds for a write in progress to abort


TrackedMessage = messages.ShareWritten | messages.ShareDropped | messages.CheckpointWritten


class _Corrupted(Exception):
    """Error raised for a commit with infinite or NaN parameters, from which training could not continue."""


class _Dropped(Exception):
    """Exception that aborts the write of a checkpoint that is no longer needed."""


@dataclass
class _Attempt:
    """Commit that is being written.

    Args:
        number: number of the request that the commit fulfills.
    """

    number: int
    name: CommitName
    held: HeldCommit
    rank: int
    size: int
    began_at: float
    off: threading.Event = field(default_factory=threading.Event)
    sealing: bool = False

    def alive(self) -> None:
        if self.off.is_set():
            raise _Dropped


class CheckpointWriter:
    """Writer of the checkpoints of one process.

    Args:
        storage: folder of checkpoints.
        options: checkpoint options of the job.
        send: function that sends a message to the driver.
        alone: whether this is a world of one rank without a driver.
    """

    def __init__(
        self,
        storage: Storage,
        options: CheckpointOptions,
        send: Callable[[Message], None],
        *,
        alone: bool,
    ) -> None:
        self._storage = storage
        self._options = options
        self.run = options.run  # run number, updated for each world
        self._send = send
        self._alone = alone
        self._schedule = Schedule(options.every_commits, options.every_s, monotonic())
        self._attempt: _Attempt | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._away = False  # whether the current failure of the storage was already logged
        self._commits = 0  # number of commits, counted here if there is no driver
        self._changed = threading.Condition()  # guards the following fields
        # time of the last message to the driver, by request
        self._worlds = 0  # number of worlds in which this worker has trained
        self._unanswered: dict[tuple[int, int], tuple[float, Message]] = {}
        # Generation and number of the last request that was begun on this rank, and whether its outcome is known.
        self._latest: tuple[int, int] | None = None
        self._settled = True
        # names of the parameters that were already non-finite at the first check
        self._odd: set[str] | None = None
        self.first_not_finite = FirstNotFinite()  # updated by the code that reduces gradients
        # last message about non-finite gradients, and the time at which it was sent
        self._not_finite: tuple[float, messages.NotFinite] | None = None
        self.newest: Commit | None = None  # newest durable commit known to this rank

    # ---- training thread -----------------------------------------------------------------------------------------

    def saved(self) -> None:
        """Record that this rank made a commit, whether or not all other ranks also made it."""
        self.first_not_finite.saved()

    def stepped_back(self) -> None:
        """Record that the state of this rank was restored to its newest commit."""
        self.first_not_finite.stepped_back()

    def committed(self, state: ObjectState, commit: Commit, place: Place) -> None:
        """Handle a commit that all ranks have made.

        Raises:
            Invalid: the state cannot be written to a checkpoint.
        """
        if self._alone:
            self._commits += 1
            commit = Commit(commit.generation, self._commits)
        if self._thread is None:
            self._begin(functools.partial(prepare_hold, state))
        self._repeat()
        self._report_gradients(commit)
        busy = self._attempt is not None or not self._settled
        step = self._schedule.at_commit(commit, monotonic(), leads=place.rank == 0, busy=busy)
        if step.ask is not None:
            due = messages.CheckpointDue(commit.generation, step.ask)
            if self._alone:
                self._schedule.request(due.generation, commit.number + 1)
            else:
                self._send(due)
        if step.begin is None:
            return
        before = self._attempt
        if before is not None:
            if not self._alone:
                still = f"commit {before.name.commit} is still being written"
                self._send_tracked(
                    messages.ShareDropped(commit.generation, step.begin, still, True)
                )
            return
        self._hold(state, commit, step.begin, place)

    def _hold(self, state: ObjectState, commit: Commit, number: int, place: Place) -> None:
        name = CommitName(self.run, commit.generation, commit.number)
        attempt = _Attempt(number, name, hold(state), place.rank, place.size, monotonic())
        self._attempt = attempt
        with self._changed:
            self._latest, self._settled = (commit.generation, number), False
        self._begin(functools.partial(self._share, attempt))

    def _report_gradients(self, commit: Commit) -> None:
        """Report non-finite gradients immediately, because a faulty worker may exit before the next checkpoint."""
        first, generation = self.first_not_finite, commit.generation
        if self._alone or not first.lasts():
            self._not_finite = None
            return
        now, digest = monotonic(), first.digest()
        message = messages.NotFinite(generation, commit, digest)
        if self._not_finite is not None:
            at, sent = self._not_finite
            if (sent.generation, sent.digest) == (generation, digest):
                if now - at < REPEAT_S:
                    return
                message = sent
        self._not_finite = (now, message)
        self._send(message)

    def want(self) -> None:
        """Request a checkpoint of the next possible commit. This method is called on all ranks."""
        self._schedule.wanted()

    def finish(
        self, state: ObjectState, commit: Commit, place: Place, over: Callable[[], bool]
    ) -> None:
        """Wait until the last commit is durable. This method is called after the training function has returned.

        All ranks must call this after the same commit.

        Args:
            state: the training state.
            commit: the last commit.
            place: this rank's place in the world.
            over: callable that returns whether the world has failed, which ends the wait.
        """
        if self._alone:
            commit = Commit(commit.generation, self._commits)
        deadline = monotonic() + FINISH_S
        if self._wait(deadline, over):
            if self.newest == commit:
                return
            # The last commit is written as an additional request, so it needs an unused number.
            self._hold(state, commit, commit.number + 1, place)
            self._wait(deadline, over)
        if self.newest == commit or over() or place.rank:
            return
        newest = self.newest
        known = (
            f"the newest durable one is {newest}" if newest else "no commit of this run is durable"
        )
        within = f" within {FINISH_S:.0f} s" if monotonic() >= deadline else ""
        self._print(f"the last commit, {commit}, did not become durable{within}; {known}")

    def returned(self, commit: Commit, place: Place, incarnation: int) -> None:
        """Record, for the driver, that the training function returned after this commit.

        Nothing is recorded unless the commit is durable and no worker was lost or replaced: the files that a lost
        worker has read are unknown.
        """
        first = self._worlds == 1 and incarnation == 1 and commit.generation <= FIRST_GENERATIONS
        if self.newest == commit and first:
            with contextlib.suppress(
                OSError
            ):  # If the same command is run again, training continues from this commit.
                name = CommitName(self.run, commit.generation, commit.number)
                began_at = process_began_at()
                finished_training.note_read(self._storage, name, place.rank, began_at)
                if place.rank == 0:
                    finished_training.note_returned(self._storage, name, began_at, place.size)

    def _wait(self, deadline: float, over: Callable[[], bool]) -> bool:
        """Wait until the outcome of the latest request is known.

        Return False at the deadline or if ``over`` returns True.
        """
        with self._changed:
            while not self._settled or self._attempt is not None:
                if over() or monotonic() >= deadline:
                    return False
                self._changed.wait(LOOK_S)  # The world may fail without a call of `world_over`.
                self._repeat()
        return True

    def _settle(self, generation: int, number: int, commit: Commit | None) -> None:
        with self._changed:
            self.newest = commit or self.newest
            self._unanswered.pop((generation, number), None)
            if self._latest == (generation, number):
                self._settled = True
            self._changed.notify_all()

    def world_over(self, generation: int) -> None:
        """Drop the requests of the ended world, except those for which only the manifest is missing."""
        self._worlds += 1
        attempt = self._attempt
        if attempt is not None and attempt.name.generation != generation and not attempt.sealing:
            attempt.off.set()
            # `off` ends only a write in progress, and this rank may already have written its share.
            self._begin(functools.partial(self._over, attempt))
        with self._changed:
            if self._latest is not None and self._latest[0] != generation:
                self._settled = True
            for old in [each for each in self._unanswered if each[0] != generation]:
                del self._unanswered[old]

    def close(self) -> None:
        """Stop the writing thread at exit. A checkpoint in progress remains incomplete and is ignored by later jobs."""
        if self._attempt is not None:
            self._attempt.off.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_S)

    # ---- link thread ---------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> bool:
        """Handle a message from the driver. Return whether it concerns checkpoints."""
        match message:
            case messages.MakeDurable(generation, number) if self._latest == (generation, number):
                # The request is repeated because some rank has not received its outcome.
                if self._settled:
                    over = "this rank has already received its outcome"
                    self._send(messages.ShareDropped(generation, number, over, True))
            case messages.MakeDurable(generation, number):
                before = self._schedule.target
                if not self._schedule.request(generation, number):
                    late = "the request arrived too late"
                    self._send_tracked(messages.ShareDropped(generation, number, late, True))
                elif before not in (None, number) and self._latest != (generation, before):
                    # Other ranks may have begun the previous request and would wait for this rank.
                    another = f"commit {number} was requested instead"
                    self._send_tracked(messages.ShareDropped(generation, before, another, True))
            case messages.CheckpointSoon():
                self._schedule.hasten(monotonic())
            case messages.SealCheckpoint(generation, number):
                attempt = self._attempt_of(generation, number)
                if attempt is not None:
                    attempt.sealing = True
                    self._begin(functools.partial(self._seal, attempt))
            case messages.DropCheckpoint(generation, number, again):
                self._schedule.dropped(number, monotonic(), again=again)
                self._settle(generation, number, None)
                attempt = self._attempt_of(generation, number)
                if attempt is not None:
                    attempt.off.set()
                    self._begin(functools.partial(self._over, attempt))
            case messages.CheckpointDone(generation, number, commit):
                self._schedule.settled(number)
                self._settle(generation, number, commit)
            case _:
                return False
        return True

    def _send_tracked(self, message: TrackedMessage) -> None:
        with self._changed:
            self._unanswered[message.generation, message.number] = (monotonic(), message)
        self._send(message)

    def _repeat(self) -> None:
        if not self._unanswered:
            return
        now = monotonic()
        with self._changed:
            late = [each for each in self._unanswered.items() if now - each[1][0] >= REPEAT_S]
            for request, (_, message) in late:
                self._unanswered[request] = (now, message)
        for _, (_, message) in late:
            self._send(message)

    def _attempt_of(self, generation: int, number: int) -> _Attempt | None:
        attempt = self._attempt
        if attempt is None or (attempt.name.generation, attempt.number) != (generation, number):
            return None
        return attempt

    # ---- background thread ---------------------------------------------------------------------------------------

    def _begin(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="elastic-checkpoints", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        # Lower the priority of this thread, so that training is not slowed down. Only Linux has priorities per thread.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._jobs.get()) is not None:
            job()

    def _share(self, attempt: _Attempt) -> None:
        digests: dict[str, int] = {}

        def write() -> None:
            if self._odd is None and not attempt.held.is_sharded:
                self._odd = commit_files.not_finite(attempt.held)
            if not self._alone:
                digests.update(commit_files.replica_digests(attempt.held))
            commit_files.write_share(
                self._storage, attempt.name, attempt.held, attempt.rank, attempt.size, attempt.alive
            )

        if not self._persist(attempt, write):
            return
        if attempt.rank:
            self._over(attempt)
        if self._alone:
            self._seal(attempt)
        else:
            name = attempt.name
            self._send_tracked(
                messages.ShareWritten(name.generation, attempt.number, name.commit, digests)
            )

    def _look_at_numbers(self, held: HeldCommit, shares: Sequence[Share]) -> None:
        found = {name for share in shares for name in share.not_finite}
        if not held.is_sharded:
            found = commit_files.not_finite(held)
        elif self._odd is None:
            self._odd = found
        new = sorted(found - (self._odd or set()))
        if new:
            raise _Corrupted(
                f"{', '.join(new[:NAMED])}{' ...' if len(new) > NAMED else ''} became infinite or NaN. No checkpoint"
                " is written until all parameters are finite: lower the learning rate, or restart from an earlier"
                " checkpoint"
            )

    def _seal(self, attempt: _Attempt) -> None:
        if self._attempt is not attempt:
            return

        step: int | None = None

        def write() -> None:
            nonlocal step
            look = functools.partial(self._look_at_numbers, attempt.held)
            sealed = commit_files.seal(
                self._storage, attempt.name, attempt.held, attempt.size, attempt.alive, look
            )
            step = sealed.step

        if not self._persist(attempt, write):
            return
        sizes = self._storage_size(attempt.name)
        took_s = monotonic() - attempt.began_at
        self._over(attempt)
        self._schedule.written()
        if self._alone:
            self._schedule.settled(attempt.number)
            self._settle(attempt.name.generation, attempt.number, attempt.name.commit)
        else:
            name = attempt.name
            place = f"{self._storage.url}/{name}"
            self._send_tracked(
                messages.CheckpointWritten(
                    name.generation, attempt.number, name.commit, place, sizes, took_s, step
                )
            )
        with contextlib.suppress(OSError):  # The removal is retried after the next checkpoint.
            catalog.prune(self._storage, self._options.keep, self._options.floor)

    def _storage_size(self, name: CommitName) -> int:
        with contextlib.suppress(OSError):
            return sum(self._storage.sizes(str(name)).values())
        return 0

    def _persist(self, attempt: _Attempt, write: Callable[[], None]) -> bool:
        """Call ``write`` until it succeeds or the attempt is cancelled. Return whether it succeeded.

        Consecutive storage failures are logged only once.
        """
        try:
            storage_retries.write_until(
                attempt.off, write, lambda error: self._fails(attempt, error)
            )
        except (_Dropped, OSError):
            self._over(attempt)
            return False
        except (UnreadableCommit, DeviceLost, _Corrupted) as error:
            self._refuse(attempt, str(error))
            return False
        except Exception as error:  # An error of a checkpoint must not end the training.
            self._refuse(attempt, f"{type(error).__name__}: {error}")
            return False
        if self._away:
            self._away = False
            self._print(f"checkpoints can be written to {self._storage.url} again")
        return True

    def _refuse(self, attempt: _Attempt, reason: str) -> None:
        self._over(attempt)
        self._schedule.dropped(attempt.number, monotonic(), again=False)
        if self._alone:
            self._settle(attempt.name.generation, attempt.number, None)
            self._print(f"commit {attempt.name.commit} was not written to a checkpoint: {reason}")
        else:
            name = attempt.name
            self._send_tracked(messages.ShareDropped(name.generation, attempt.number, reason))

    def _over(self, attempt: _Attempt) -> None:
        if self._attempt is attempt:
            attempt.held.release()
            with self._changed:
                self._attempt = None
                self._changed.notify_all()

    def _fails(self, attempt: _Attempt, error: BaseException | None) -> None:
        if self._away:
            return
        self._away = True
        self._print(
            f"commit {attempt.name.commit} can't be written to {self._storage.url} yet ({error}); the write is retried"
            " while training continues"
        )

    def _print(self, text: str) -> None:
        print(f"elastic: {text}", file=sys.stderr, flush=True)
