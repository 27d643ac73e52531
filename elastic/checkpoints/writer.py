"""Writes durable commits of one worker in the background, from the copies that its commits make anyway.

The training thread only says that a commit is to be held; the next commits are copied elsewhere meanwhile. A thread
writes this rank's share, tries again for as long as the storage fails, and says when it is there. When the driver has
heard that of all ranks, rank 0 writes the rest. Storage never fails a step: at worst there is no newer checkpoint.
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

import tenacity

from elastic.checkpoints import catalog, finished, writing
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import Name, NotReadable, Share
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.schedule import Schedule
from elastic.errors import DeviceLost
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.protocol import messages
from elastic.protocol.messages import Commit, Message, Place
from elastic.state.held import Held
from elastic.state.state import ObjectState, hold, prepare_hold

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 3.0
FINISH_S = 60.0  # for the last commit of a training to become durable
LOOK_S = 0.1  # between two looks at whether the world is over
NICE = 19  # of the thread that writes
REPEAT_S = 5.0  # between two times that the driver is told something that it has not answered
NAMED = 3  # parameters in a message
FIRST_GENERATIONS = 2  # that of init() and that of the training, where no worker was lost
CLOSE_S = 2.0  # for what is being written to notice that nobody wants it any more


Told = messages.ShareWritten | messages.ShareDropped | messages.CheckpointWritten


class _Spoilt(Exception):
    """A commit that nobody could go on from; the ones before it are worth more."""


class _Dropped(Exception):
    """Nobody wants this checkpoint any more."""


@dataclass
class _Attempt:
    """One commit on its way to the storage. ``number``: the request that it meets."""

    number: int
    name: Name
    held: Held
    rank: int
    size: int
    began_at: float
    off: threading.Event = field(default_factory=threading.Event)
    sealing: bool = False

    def alive(self) -> None:
        if self.off.is_set():
            raise _Dropped


class Writer:
    """One per process. ``send``: to the driver; without one (a world of one) nobody need be asked."""

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
        self.run = options.run  # until a world says another one
        self._send = send
        self._alone = alone
        self._schedule = Schedule(options.every_commits, options.every_s, monotonic())
        self._attempt: _Attempt | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._away = False  # the storage failed, and that was said
        self._commits = 0  # in a world of one nobody else counts them
        self._changed = threading.Condition()  # of what is below
        # By request, and when it was said last.
        self._worlds = 0  # in which this worker has trained
        self._unanswered: dict[tuple[int, int], tuple[float, Message]] = {}
        # Generation and number of the last request that was begun here, and whether it is known how that has ended.
        self._latest: tuple[int, int] | None = None
        self._settled = True
        self._odd: set[str] | None = (
            None  # parameters that were not finite when it was looked first
        )
        self.first_not_finite = FirstNotFinite()  # told of gradients by whoever reduces them
        self._not_finite: tuple[float, messages.NotFinite] | None = None  # when it was said last
        self.newest: Commit | None = None  # that is durable, as far as this rank has heard

    # ---- training thread -----------------------------------------------------------------------------------------

    def saved(self) -> None:
        """A commit was made, here or by all."""
        self.first_not_finite.saved()

    def stepped_back(self) -> None:
        """To the newest commit that was made here."""
        self.first_not_finite.stepped_back()

    def committed(self, state: ObjectState, commit: Commit, place: Place) -> None:
        """A commit was made by all ranks alike. Raises Invalid if the state can't be written down at all."""
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
                self._schedule.told(due.generation, commit.number + 1)
            else:
                self._send(due)
        if step.begin is None:
            return
        before = self._attempt
        if before is not None:
            if not self._alone:
                still = f"commit {before.name.commit} is still being written"
                self._tell(messages.ShareDropped(commit.generation, step.begin, still, True))
            return
        self._hold(state, commit, step.begin, place)

    def _hold(self, state: ObjectState, commit: Commit, number: int, place: Place) -> None:
        name = Name(self.run, commit.generation, commit.number)
        attempt = _Attempt(number, name, hold(state), place.rank, place.size, monotonic())
        self._attempt = attempt
        with self._changed:
            self._latest, self._settled = (commit.generation, number), False
        self._begin(functools.partial(self._share, attempt))

    def _report_gradients(self, commit: Commit) -> None:
        """At once: the next checkpoint may be far, and whose memory it was may be gone by then."""
        first, generation = self.first_not_finite, commit.generation
        if self._alone or not first.lasts():
            self._not_finite = None
            return
        now, digest = monotonic(), first.digest()
        message = messages.NotFinite(generation, commit, digest)
        if self._not_finite is not None:
            at, said = self._not_finite
            if (said.generation, said.digest) == (generation, digest):
                if now - at < REPEAT_S:
                    return
                message = said
        self._not_finite = (now, message)
        self._send(message)

    def want(self) -> None:
        """The next commit is to be written; if that can't be, one of those that follow. Called on all ranks alike."""
        self._schedule.wanted()

    def finish(
        self, state: ObjectState, commit: Commit, place: Place, over: Callable[[], bool]
    ) -> None:
        """The training function has returned: its last commit becomes durable, if it is not yet. Waits for that.

        All ranks must come here after the same commit. ``over``: whether the world broke; that ends the wait.
        """
        if self._alone:
            commit = Commit(commit.generation, self._commits)
        deadline = monotonic() + FINISH_S
        if self._wait(deadline, over):
            if self.newest == commit:
                return
            self._hold(state, commit, commit.number + 1, place)  # a request that nobody has made
            self._wait(deadline, over)
        if self.newest == commit or over() or place.rank:
            return
        newest = self.newest
        known = f"the newest durable one is {newest}" if newest else "no commit of this run is"
        within = f" within {FINISH_S:.0f} s" if monotonic() >= deadline else ""
        self._say(f"the last commit, {commit}, could not be made durable{within}; {known}")

    def returned(self, commit: Commit, place: Place, incarnation: int) -> None:
        """The training function has returned after this commit. Noted, for the driver, if that is durable and the
        workers are those of the first world: nobody knows what a lost one has read.
        """
        first = self._worlds == 1 and incarnation == 1 and commit.generation <= FIRST_GENERATIONS
        if self.newest == commit and first:
            with contextlib.suppress(OSError):  # the same command then trains on from this commit
                name = Name(self.run, commit.generation, commit.number)
                began_at = finished.process_began_at()
                finished.note_read(self._storage, name, place.rank, began_at)
                if place.rank == 0:
                    finished.note_returned(self._storage, name, began_at, place.size)

    def _wait(self, deadline: float, over: Callable[[], bool]) -> bool:
        """Until it is known what became of the latest request. False: not in time, or ``over``."""
        with self._changed:
            while not self._settled or self._attempt is not None:
                if over() or monotonic() >= deadline:
                    return False
                self._changed.wait(LOOK_S)  # a world may break without a word to this object
                self._repeat()
        return True

    def _settle(self, generation: int, number: int, commit: Commit | None) -> None:
        """What became of a request: None, or what is durable now."""
        with self._changed:
            self.newest = commit or self.newest
            self._unanswered.pop((generation, number), None)
            if self._latest == (generation, number):
                self._settled = True
            self._changed.notify_all()

    def world_over(self, generation: int) -> None:
        """A world begins. What an earlier one has not completed stays undone, unless only the manifest is missing."""
        self._worlds += 1
        attempt = self._attempt
        if attempt is not None and attempt.name.generation != generation and not attempt.sealing:
            attempt.off.set()
            self._begin(functools.partial(self._over, attempt))  # its share may be written already
        with self._changed:
            if self._latest is not None and self._latest[0] != generation:
                self._settled = True
            for old in [each for each in self._unanswered if each[0] != generation]:
                del self._unanswered[old]

    def close(self) -> None:
        """At exit. What is under way stays torn, and is passed over later."""
        if self._attempt is not None:
            self._attempt.off.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_S)

    # ---- link thread ---------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> bool:
        """Whether the message was meant for this."""
        match message:
            case messages.MakeDurable(generation, number) if self._latest == (generation, number):
                if self._settled:  # and somebody has not heard how
                    over = "it is over for this rank"
                    self._send(messages.ShareDropped(generation, number, over, True))
            case messages.MakeDurable(generation, number):
                before = self._schedule.target
                if not self._schedule.told(generation, number):
                    late = "it was asked for too late"
                    self._tell(messages.ShareDropped(generation, number, late, True))
                elif before not in (None, number) and self._latest != (generation, before):
                    # Others may have begun that one by now, and must not wait for this rank.
                    another = f"commit {number} was asked for instead"
                    self._tell(messages.ShareDropped(generation, before, another, True))
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

    def _tell(self, message: Told) -> None:
        """Says it, and again until there is an answer: a connection may break, and a driver be replaced."""
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

    # ---- in the background ---------------------------------------------------------------------------------------

    def _begin(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="elastic-checkpoints", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        # Training comes first. Only on Linux a thread has a priority of its own.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._jobs.get()) is not None:
            job()

    def _share(self, attempt: _Attempt) -> None:
        digests: dict[str, int] = {}

        def write() -> None:
            if self._odd is None and not attempt.held.is_sharded:
                self._odd = writing.not_finite(attempt.held)
            if not self._alone:
                digests.update(writing.replica_digests(attempt.held))
            writing.write_share(
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
            self._tell(messages.ShareWritten(name.generation, attempt.number, name.commit, digests))

    def _look_at_numbers(self, held: Held, shares: Sequence[Share]) -> None:
        """Raises _Spoilt where parameters are not finite any more: in time such commits would displace all others.

        Of replicas that are equal: one that is not has to be named first. Of sharded parameters each rank has looked
        at its rows.
        """
        found = {name for share in shares for name in share.not_finite}
        if not held.is_sharded:
            found = writing.not_finite(held)
        elif self._odd is None:
            self._odd = found
        new = sorted(found - (self._odd or set()))
        if new:
            raise _Spoilt(
                f"{', '.join(new[:NAMED])}{' ...' if len(new) > NAMED else ''} became infinite or NaN: nothing is"
                " written until that is over, and what was written before stays"
            )

    def _seal(self, attempt: _Attempt) -> None:
        if self._attempt is not attempt:
            return

        step: int | None = None

        def write() -> None:
            nonlocal step
            look = functools.partial(self._look_at_numbers, attempt.held)
            sealed = writing.seal(
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
            self._tell(
                messages.CheckpointWritten(
                    name.generation, attempt.number, name.commit, place, sizes, took_s, step
                )
            )
        with contextlib.suppress(OSError):  # the next time, then
            catalog.prune(self._storage, self._options.keep, self._options.floor)

    def _storage_size(self, name: Name) -> int:
        with contextlib.suppress(OSError):
            return sum(self._storage.sizes(str(name)).values())
        return 0

    def _persist(self, attempt: _Attempt, write: Callable[[], None]) -> bool:
        """Until it has succeeded or is not wanted any more. Returns which. Says once that the storage fails."""
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            wait=tenacity.wait_random_exponential(FIRST_RETRY_S, LONGEST_RETRY_S),
            stop=tenacity.stop_when_event_set(attempt.off),
            sleep=tenacity.sleep_using_event(attempt.off),
            before_sleep=lambda tried: self._fails(attempt, tried.outcome),
            reraise=True,
        )
        try:
            tries(write)
        except (_Dropped, OSError):
            self._over(attempt)
            return False
        except (NotReadable, DeviceLost, _Spoilt) as error:
            self._refuse(attempt, str(error))
            return False
        except Exception as error:  # a bug here must not end the training
            self._refuse(attempt, f"{type(error).__name__}: {error}")
            return False
        if self._away:
            self._away = False
            self._say(f"checkpoints can be written to {self._storage.url} again")
        return True

    def _refuse(self, attempt: _Attempt, reason: str) -> None:
        self._over(attempt)
        self._schedule.dropped(attempt.number, monotonic(), again=False)
        if self._alone:
            self._settle(attempt.name.generation, attempt.number, None)
            self._say(f"commit {attempt.name.commit} could not be made durable: {reason}")
        else:
            name = attempt.name
            self._tell(messages.ShareDropped(name.generation, attempt.number, reason))

    def _over(self, attempt: _Attempt) -> None:
        if self._attempt is attempt:
            attempt.held.release()
            with self._changed:
                self._attempt = None
                self._changed.notify_all()

    def _fails(self, attempt: _Attempt, outcome: tenacity.Future | None) -> None:
        if self._away:
            return
        self._away = True
        error = None if outcome is None else outcome.exception()
        self._say(
            f"commit {attempt.name.commit} can't be written to {self._storage.url} yet ({error});"
            " training goes on, and it is tried again until it succeeds"
        )

    def _say(self, text: str) -> None:
        print(f"elastic: {text}", file=sys.stderr, flush=True)
