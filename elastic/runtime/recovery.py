"""State machine of a worker across changes of the world: abort, restore, wait, hold, stop. Pure: no I/O, no clock.

    OUTSIDE --wait_for_world--> WAITING --World--> TRAINING --Broken, or a collective failed--> BROKEN
                                   ^                  | all stopped at the safepoint               |
                                   +------------------+------------------ wait_for_world ----------+
    TRAINING --returned--> RETURNED --Finish--> FINISHED (--init() again--> WAITING)       any phase --> OVER
                                                   | a collective failed in a second training: no world follows
                                                   +--> BROKEN

Two threads call the state machine, one at a time (the runtime holds a lock): the link thread with the driver's
messages, and the training thread with the events of user code. It never raises an exception itself. It returns what the
training thread must raise at its next check, collective or step.

Safepoints are numbered from the start of each world. A planned change is agreed without a collective: each worker
reports its number c at the driver's request, and holds its training thread at safepoint c + 1. The driver sends the
largest c + 1 to all workers. Workers that have not reached that safepoint continue up to it, so that all stop at the
same place. If groups of workers train independently of each other, each group stops at its own largest c + 1.

A connection may be lost and replaced, and messages sent in the meantime are lost. On the new connection, this state
machine reports its phase and repeats its unanswered messages, and the driver repeats the messages that still apply.
Either side may therefore receive a message twice or late. Every message is checked by its generation and number, and
outdated or repeated messages have no effect.

The number of a commit is the number of its safepoint, not a count of commits. Equal numbers in one generation therefore
denote the same place in the training, even if a worker has missed messages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from elastic.protocol import messages
from elastic.protocol.calls import Called
from elastic.protocol.messages import Address, Commit, Message, Place
from elastic.runtime.failures.excused_error import ErrorExcuse

# base of the numbers of commits that only one worker holds (its rank is subtracted); larger than any safepoint's number
ALONE = 10**9


class Phase(enum.Enum):
    OUTSIDE = "outside"  # the worker is not in a world
    WAITING = "waiting"  # the worker has sent Ready and waits for a world
    TRAINING = "training"
    # the world has ended, and the training thread has not requested another one yet
    BROKEN = "broken"
    RETURNED = "returned"
    FINISHED = "finished"
    OVER = "over"  # final: this process enters no other world


class Verdict(enum.Enum):
    """Action of the training thread at a safepoint."""

    PASS = "pass"
    HOLD = "hold"  # wait for the driver's answer
    STOP = "stop"  # the worker is at the agreed safepoint: raise WorldChanging
    BROKEN = "broken"  # raise PeerLost
    OVER = "over"


@dataclass(frozen=True)
class Send:
    message: Message


@dataclass(frozen=True)
class AbortGroups:
    """Action: abort all collectives of this generation immediately."""

    generation: int
    reason: str


Action = Send | AbortGroups


@dataclass
class Recovery:
    """State machine of one worker. The runtime reads its fields; only this class writes them."""

    phase: Phase = Phase.OUTSIDE
    generation: int = 0
    place: Place = field(default_factory=lambda: Place(0, 1, 0, 1, 0, 1))
    # whether the worker has not joined a world yet, so that its place may still change
    provisional: bool = True
    newcomer: bool = False
    step_input: bytes = b""  # step input of the world that was training when this worker joined
    world: messages.World | None = None
    running: bool = False  # whether the worker is inside elastic.run
    # whether the worker is in a second or later training, which no other world follows; stays True if the world of that
    # training has failed
    again: bool = False
    # whether the worker waits as a standby, because the world has its maximum size
    stands_by: bool = False
    reason: str = ""  # reason why the world has failed or the job has ended
    newest: Commit | None = None
    # newest sealed commit of a sharded state: see `elastic.protocol.messages.ShardsHeld`
    sealed: Commit | None = None
    # message that ended the job for this worker: Leave, Rejected or End
    over: Message | None = None
    _welcomed: bool = False
    _calls: tuple[Called, ...] = ()  # the ranks' differing calls, if they made the world fail
    _readies: int = 0
    _ready: messages.Ready | None = None  # last Ready message, or None after its world has formed
    # whether this worker was the first to detect the world's failure, and has notified the driver
    _own_failure: bool = False
    # this generation's recovery report, or None before its first collective
    _resumed: messages.Resumed | None = None
    ending: ErrorExcuse = field(default_factory=ErrorExcuse)
    # report of the reason why user code ends the process
    _last_report: messages.Raised | messages.Quit | None = None
    _checks: int = 0
    # whether the agreed safepoint was reached, so that the next commit gets its number
    _stopped: bool = False
    _change: int = 0
    _passed: int = 0  # last planned change for which this worker has stopped waiting; see `release`
    _hold_at: int | None = None
    _stop_at: int | None = None
    _stranded: bool = False
    # Name of the workers that stop at the same safepoint as this worker for a planned change, because other workers
    # reach safepoints of the same number at different times. Empty if all members stop at the same safepoint.
    stop_group: str = ""

    # ---- the driver's messages -------------------------------------------------------------------------------------

    def receive(self, message: Message) -> list[Action]:
        """Process a message from the driver, and return the actions for the link thread."""
        if isinstance(message, messages.Restate):
            return self.reconnected()
        if self.phase is Phase.OVER:
            return []
        match message:
            case messages.Welcome():
                self._welcomed = True
                self.step_input = message.step_input
                # otherwise the message is outdated
                if self.phase in (Phase.OUTSIDE, Phase.WAITING):
                    self.place, self.newcomer = message.place, message.newcomer
                if message.newcomer and self.phase is Phase.WAITING and not self.running:
                    # The world has started to train without this worker, which waits for it in init().
                    self.phase = Phase.OUTSIDE
            case messages.StandBy():
                self.stands_by = self.phase is Phase.WAITING
            case messages.World():
                self._take_place(message)
            case messages.Broken(generation=generation, reason=reason):
                if generation == self.generation and self.phase in (Phase.TRAINING, Phase.RETURNED):
                    self._break(reason)
                    return [AbortGroups(generation, reason)]
            case messages.Prepare(generation=generation, change=change):
                if generation == self.generation and self.phase is Phase.TRAINING:
                    return self._prepare(change)
            case messages.StopAt(generation=generation, change=change, check=check):
                if generation == self.generation and change == self._change:
                    if change == self._passed:
                        return self.fail(
                            generation, "the message with the safepoint arrived too late"
                        )
                    self._stop_at = check
            case messages.Proceed(generation=generation, change=change):
                if generation == self.generation and change == self._change:
                    self._hold_at = self._stop_at = None
            case messages.Finish(generation=generation):
                if generation == self.generation and self.phase is Phase.RETURNED:
                    self.phase = Phase.FINISHED
                    self.discard_commit()  # a second training starts without a commit
            case messages.CheckpointSoon(generation=generation):
                if generation == self.generation:
                    self.ending.wants_checkpoint()
            case messages.Leave(reason, fenced=True):
                return self._end(message, f"this worker was fenced: {reason}")
            case messages.Leave() | messages.Rejected() | messages.End():
                return self._end(message, message.reason)
            case _:
                pass  # Ignore an optional message of a newer version.
        return []

    def _prepare(self, change: int) -> list[Action]:
        if change > self._change:
            self._change, self._hold_at, self._stop_at = change, self._checks + 1, None
        elif change < self._change or self._hold_at is None or self._stop_at is not None:
            # The message is outdated, or a repetition that arrives after a later message about the same change.
            return []
        # Repeat the same answer for a repeated request: other workers may already be stopping because of the first one.
        passed = self._hold_at - 1
        return [Send(messages.Checked(self.generation, change, passed, self.stop_group))]

    def _take_place(self, world: messages.World) -> None:
        if self.phase is not Phase.WAITING or world.generation <= self.generation:
            return
        self.phase = Phase.TRAINING
        self.world = world
        self.generation, self.place = world.generation, world.place
        self.provisional = self.newcomer = self._stranded = self._stopped = False
        self.stands_by = False
        self._ready, self._resumed, self._own_failure = None, None, False
        self.reason = ""
        self._checks = 0
        self._hold_at = self._stop_at = None

    def _break(self, reason: str) -> None:
        self.phase = Phase.BROKEN
        self._calls = ()
        self.reason = reason
        self._hold_at = self._stop_at = None

    def _end(self, message: Message, reason: str) -> list[Action]:
        self.phase = Phase.OVER
        self.reason = reason
        self.over = message
        return [AbortGroups(self.generation, reason)]

    def driver_lost(self, reason: str) -> list[Action]:
        """Process the loss of the driver. No other world can form without it."""
        if self.finished or self.phase is Phase.OVER:
            return []
        return self._end(messages.End(reason), reason)

    def reconnected(self) -> list[Action]:
        """Return the messages to repeat on a new connection, because the driver may not have received them."""
        unanswered: list[Message] = [messages.Reconnected(self.generation, self._welcomed)]
        if self.leaving:
            unanswered.append(messages.Leaving(self.ending.leaving))
        if self._resumed is not None:
            unanswered.append(self._resumed)
        match self.phase:
            case Phase.WAITING if self._ready is not None:
                unanswered.append(self._ready)
            case Phase.BROKEN if self._own_failure:
                unanswered.append(
                    _broke(messages.Failed, self.generation, self.reason, self._calls)
                )
            case Phase.BROKEN if self._stranded:
                unanswered.append(
                    _broke(messages.Stranded, self.generation, self.reason, self._calls)
                )
            case Phase.RETURNED:
                unanswered.append(messages.Returned(self.generation))
            case Phase.OVER if self._last_report is not None:
                unanswered.append(self._last_report)
        return [Send(message) for message in unanswered]

    @property
    def leaving(self) -> bool:
        """Return whether this worker has requested to leave."""
        return bool(self.ending.leaving)

    def ask_to_leave(self, reason: str) -> list[Action]:
        """Request to leave at the next commit. This method is called after SIGTERM."""
        if self.phase is Phase.OVER:
            return []
        self.ending.leaves(reason)
        return [Send(messages.Leaving(reason))]

    def resumed(
        self,
        phases_ms: dict[str, float],
        copied_bytes: int = 0,
        from_checkpoint: bool = False,
        shards: messages.ShardsPlaced | None = None,
    ) -> list[Action]:
        """Report that user code has completed its first collective in this generation."""
        self._resumed = messages.Resumed(
            self.generation, phases_ms, copied_bytes, from_checkpoint, shards
        )
        return [Send(self._resumed)]

    # ---- events of the training thread -----------------------------------------------------------------------------

    def enter(self) -> None:
        """Begin ``elastic.run``, and discard earlier commits, which do not belong to this training."""
        self.running = True
        self.discard_commit()

    def leave(self) -> None:
        """Record that ``elastic.run`` has ended."""
        self.running = False

    def train_again(self) -> None:
        """Begin a second or later training. It makes no commits, and ends if its world fails."""
        self.again = True
        if self.world is not None:
            # The members have sent these values before the first training, and have changed them since.
            self.world = msgspec.structs.replace(self.world, metadata=[], source={})

    def trained_again(self) -> None:
        """Record the end of a second or later training."""
        self.again = self.phase is Phase.BROKEN

    @property
    def finished(self) -> bool:
        """Return whether the job's training has succeeded."""
        return self.phase is Phase.FINISHED or (self.again and self.phase is Phase.BROKEN)

    def pause(self) -> None:
        """Leave the world in ``shutdown()``. A later ``init()`` waits for another one."""
        self.again = False
        if self.phase is not Phase.OVER:
            self.phase = Phase.OUTSIDE

    def wait_for_world(
        self,
        store: Address,
        layout: str,
        shards: messages.ShardsHeld | None = None,
        kept: Sequence[messages.KeptCommit] = (),
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
        source: Mapping[str, str] | None = None,
    ) -> list[Action]:
        """Report that this worker is ready. The driver answers with a World, or with the end of the job.

        Args:
            store: address at which this worker can serve the next world's store.
            layout: digest of the state's layout.
            shards: shards that this worker holds, or None if its state is not sharded.
            kept: older commits that this worker holds copies of.
            step: step counter of the state at this worker's commit, or None.
            metadata, source: see `elastic.protocol.messages.World`.
        """
        if self.phase is Phase.OVER:
            return []
        self.phase = Phase.WAITING
        self._readies += 1
        commit = self.newest if self.running else None
        self._ready = messages.Ready(
            self.generation,
            commit,
            store,
            layout,
            self.running,
            self._readies,
            shards,
            messages.OlderCommits((*kept,) if commit is not None else ()),
            None if commit is None else step,
            bool(self.stop_group),
            dict(metadata or {}),
            dict(source or {}),
        )
        return [Send(self._ready)]

    def fail(self, generation: int, reason: str, calls: tuple[Called, ...] = ()) -> list[Action]:
        """Process a failed collective. Only the first failure in a generation has an effect.

        Args:
            generation: generation of the collective.
            reason: reason for the log.
            calls: the ranks' differing calls, if they are the cause.
        """
        last = self.again and self.phase is Phase.FINISHED
        if generation != self.generation or not (
            last or self.phase in (Phase.TRAINING, Phase.RETURNED)
        ):
            return []
        self._break(reason)
        self._calls = calls
        if not self.running:
            return [AbortGroups(generation, reason), *self.strand()]
        self._own_failure = True
        failed = _broke(messages.Failed, generation, reason, calls)
        return [AbortGroups(generation, reason), Send(failed)]

    def strand(self) -> list[Action]:
        """Report that a collective failed outside ``elastic.run``, where no rollback is possible."""
        if self.running or self.again or self._stranded or self.phase is not Phase.BROKEN:
            return []
        self._stranded = True
        return [Send(_broke(messages.Stranded, self.generation, self.reason, self._calls))]

    def committed(self) -> Commit | None:
        """Assign a number to a commit that was just saved, and return the commit.

        The number is that of the next safepoint, or of the safepoint at which all workers have stopped. Outside
        ``elastic.run``, workers do not agree on commits, so the commit gets no number and belongs only to this worker.
        """
        if self.running:
            self.newest = Commit(self.generation, self._checks + (not self._stopped))
        return self.newest

    def committed_alone(self) -> None:
        """Assign a number to a commit that only this worker holds, because user code has requested a new world.

        Its number makes it newer than all agreed commits. If several workers have such a commit, that of the lowest
        rank is used, and all workers receive a copy of it.
        """
        if self.running:
            self.newest = Commit(self.generation, ALONE - self.place.rank)

    def seal(self, commit: Commit) -> None:
        """Record that all ranks have copied and mirrored a commit of a sharded state."""
        self.sealed = commit

    def agreed(self) -> Commit | None:
        """Return the newest commit, or None if only this worker holds it. Thread-safe."""
        newest = self.newest
        return newest if newest is None or newest.number < ALONE // 2 else None

    def adopt(self) -> Commit:
        """Record that all members hold the same state, which becomes commit 0 of the generation."""
        self.newest = Commit(self.generation, 0)
        return self.newest

    def goes_back(self) -> Commit | None:
        """Return the commit from which the current world begins if this worker has a newer one, else None.

        The newer commit may contain wrong gradients.

        The world begins from an older commit if the newest one may be wrong. A rank that holds a copy of the older
        commit restores it and calls `went_back`.
        """
        commit = None if self.world is None else self.world.commit
        return commit if commit is not None and (self.newest or commit) > commit else None

    def went_back(self, commit: Commit) -> None:
        """Record that this older commit was restored."""
        self.newest = commit

    def discard_commit(self) -> None:
        """Discard the newest commit: its saved state is incomplete, so no worker can continue from it."""
        self.newest = self.sealed = None

    def arrive(self) -> Verdict:
        """Count a safepoint, and return what the training thread must do there."""
        self._checks += 1
        return self.verdict()

    def verdict(self) -> Verdict:
        """Return what the training thread must do at the current safepoint.

        This method is called again after each wake-up of a waiting thread.
        """
        if self.phase is Phase.OVER:
            return Verdict.OVER
        if self.phase is Phase.BROKEN:
            return Verdict.BROKEN
        if self._stop_at is not None:
            self._stopped = self._checks >= self._stop_at
            return Verdict.STOP if self._stopped else Verdict.PASS
        if self._hold_at is not None and self._checks >= self._hold_at:
            return Verdict.HOLD
        return Verdict.PASS

    def release(self) -> None:
        """Let the training thread continue, because the driver did not answer in time.

        From then on, this worker cannot stop at the same safepoint as the other workers for this change.
        """
        self._hold_at = self._stop_at = None
        self._passed = self._change

    def returned(self) -> list[Action]:
        """Record that the training function has returned.

        The worker keeps its sockets and its commit until all workers have returned.
        """
        if self.phase is not Phase.TRAINING:
            return []
        self.phase = Phase.RETURNED
        self._hold_at = self._stop_at = None
        return [Send(messages.Returned(self.generation))]

    def raised(
        self,
        summary: str,
        traceback: str,
        hardware: bool = False,
        final: bool = False,
        code: int = 1,
        calls: tuple[Called, ...] = (),
        shards_lost: bool = False,
    ) -> list[Action]:
        """Report an exception of user code with which the process will exit.

        Args:
            summary: the exception in one line.
            traceback: traceback of the exception.
            hardware: whether hardware caused the exception.
            final: whether the job must end.
            code: exit code of the job, if ``final``.
            calls: the differing calls of the ranks, if they are the cause.
            shards_lost: whether shards of the state were lost.
        """
        generation = self.generation
        nothing_held = self.world is not None and self.world.commit is None
        beginning = nothing_held and (self.newest is None or self.newest.number == 0)
        self.phase = Phase.OVER
        self.reason = summary
        self._last_report = messages.Raised(
            generation,
            self.newest,
            summary,
            traceback,
            hardware,
            final,
            beginning,
            code,
            calls,
            shards_lost,
        )
        return [Send(self._last_report), AbortGroups(generation, summary)]

    def quit(self, code: int, call: str | None = None) -> list[Action]:
        """Report that the process will exit with ``code``.

        ``call`` is the text of the call in user code that ends the process. None means ``sys.exit``.
        """
        if self.phase is Phase.OVER:
            return []
        generation = self.generation
        self.phase = Phase.OVER
        self.reason = f"sys.exit was called under elastic.run: exit code {code}"
        if call is None:
            call = f"sys.exit({code})"
        elif not call:
            self.reason = (
                f"this process exits with code {code}: its state differs from that of its world"
            )
        self._last_report = messages.Quit(generation, code, call)
        return [Send(self._last_report), AbortGroups(generation, self.reason)]


def _broke(
    kind: type[messages.Failed | messages.Stranded],
    generation: int,
    reason: str,
    calls: tuple[Called, ...],
) -> Message:
    return kind(generation, reason, bool(calls), calls)


def excuse_error(recovery: Recovery) -> bool:
    """Return whether this worker may join another world after an exception in user code. See `ErrorExcuse.excuse`.

    Returns False without a commit, because there is no state to preserve.
    """
    trains = recovery.running and recovery.phase in (Phase.TRAINING, Phase.BROKEN)
    return trains and recovery.newest is not None and recovery.ending.excuse()
