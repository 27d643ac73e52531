"""This worker's standing in its job: the `Recovery` machine under its lock, and what it decides, done. Acts.

One lock guards the machine and wakes who waits for it. The link thread may cut groups at any time and takes no other
lock, so that nothing that a collective or the forming of a group holds can delay it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from elastic.errors import (
    CollectiveFailed,
    DriverLost,
    JobFailed,
    JobOver,
    LeaveRequested,
    PeerLost,
    StateMismatch,
)
from elastic.failpoints import failpoint
from elastic.monitoring import timeline
from elastic.monitoring.time_account import TimeAccount
from elastic.protocol import messages
from elastic.protocol.calls import Called
from elastic.protocol.messages import Message
from elastic.rendezvous.environment import Environment
from elastic.runtime.link import Link
from elastic.runtime.process_groups import Groups
from elastic.runtime.recovery import Action, Cut, Phase, Recovery, Send
from elastic.runtime.recovery_phases import Phases

WAIT_SAID_S = 30.0  # how often a long wait says what it waits for
ASLEEP_S = 3.0  # the link thread, which wakes once a second: the process did not run
ENDED = (Phase.BROKEN, Phase.OVER)


class Pulse:
    """Whether this process has run all the time. Pure: the link thread says when it wakes, once a second."""

    def __init__(self) -> None:
        self._awake_at = 0.0  # 0: the thread does not run yet
        self._slept_s = self._woke_at = 0.0

    def beat(self, now: float) -> None:
        if self._awake_at and now - self._awake_at > ASLEEP_S:
            self._slept_s, self._woke_at = now - self._awake_at, now
        self._awake_at = now

    def slept_s(self, now: float) -> float:
        """How long it did not run, if that has only just ended; or 0."""
        return self._slept_s if now - self._woke_at < ASLEEP_S else 0.0


class Session:
    """One per process, from ``init()`` to its end; worlds come and go in it.

    ``recovery`` may be read from any thread, and is changed by `update`, or under ``lock`` where nobody need be woken
    and nothing done. ``changed`` is the condition of that lock.
    """

    def __init__(self, env: Environment, link: Link | None) -> None:
        self.env = env
        self.alone = link is None  # no driver: a world of one, or a static world without recovery
        self.recovery = Recovery()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.groups = Groups(env, over=lambda: self.broken)
        self.phases = Phases()
        self.account = TimeAccount(time.monotonic())
        self.pulse = Pulse()
        self.lost_driver = False  # nobody else will say why this worker ends
        self._link = link
        self._when_lost: Callable[[], None] = lambda: None
        self._told_in = 0  # the generation whose end has been raised in user code

    # ---- the machine ---------------------------------------------------------------------------------------------

    def update(self, decide: Callable[[Recovery], list[Action]]) -> None:
        """Something happened: wakes who waits for the machine, and does what it wants done. From any thread."""
        with self.changed:
            actions = decide(self.recovery)
            self.changed.notify_all()
        for action in actions:
            match action:
                case Cut(generation):
                    failpoint("cut")
                    self.groups.cut(generation)
                case Send(message):
                    self.send(message)

    def wait_while(self, phase: Phase, what: str) -> None:
        """For the driver's word. Bounded by the driver, which counts its own deadlines, by its connection, whose loss
        is noticed, and by ``wait_timeout_s``, should the driver be frozen; but a standby waits as long as there is a
        connection. Raises DriverLost.
        """
        began = said_at = time.monotonic()
        waits = f"{self.env.worker} waits for the driver {what}"
        with self.changed:
            while self.recovery.phase is phase:
                self.changed.wait(1.0)
                now = time.monotonic()
                if self.recovery.stands_by:
                    began = said_at = now
                if now - began > self.env.wait_timeout_s:
                    raise DriverLost(
                        f"{waits}: no response from the driver for {self.env.wait_timeout_s:g} s: is elasticrun"
                        " stopped, or its host unreachable?"
                    )
                if now - said_at > WAIT_SAID_S:
                    said_at = now
                    print(f"elastic: {waits}", file=sys.stderr)

    def resumed(self) -> None:
        """A collective has completed, or a step that needs none. The first of user code in a generation is reported."""
        if self.alone or not self.recovery.running:
            return
        report = self.phases.stepped(self.recovery.generation, time.monotonic())
        if report is not None:
            self.update(lambda recovery: recovery.resumed(*report))
            if timeline.on:
                for name, begin, end in self.phases.spans:
                    timeline.span("recovery", name, round(begin * 1e9), round(end * 1e9))

    # ---- the driver ----------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """To the driver, after everything that this thread sent before. Without one it does nothing; never raises."""
        if self._link is None:
            return
        try:
            self._link.send(message)
        except DriverLost as error:
            self.driver_lost(str(error))

    def poke(self) -> None:
        """Wakes the link thread, if there is one. Safe in a signal handler."""
        if self._link is not None:
            self._link.poke()

    def when_lost(self, told: Callable[[], None]) -> None:
        """``told`` is called once the driver is gone, and perhaps again."""
        self._when_lost = told

    def driver_lost(self, reason: str) -> None:
        """Nothing comes or goes any more. From any thread; never raises."""
        slept_s = self.pulse.slept_s(time.monotonic())
        if slept_s:
            why = f"it did not run for {slept_s:.0f} s, and the others continued without it"
            said = f"this worker was fenced: {why} ({reason})"
        else:
            said = f"this worker was fenced, or elasticrun is gone: {reason}"

        def decide(recovery: Recovery) -> list[Action]:
            actions = recovery.driver_lost(said)
            self.lost_driver = self.lost_driver or bool(actions)
            return actions

        self.update(decide)
        self._when_lost()

    # ---- the end of a world --------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether the present generation is over. From any thread."""
        return self.recovery.phase in ENDED

    def mark_broken(self, generation: int, reason: str, calls: tuple[Called, ...] = ()) -> None:
        """A collective of this generation failed: cuts the rest, tells the driver. From any thread; never raises.
        ``calls``: its ranks have called different ones.
        """

        def decide(recovery: Recovery) -> list[Action]:
            actions = recovery.fail(generation, reason, calls)
            if actions:
                self.phases.mark("broken", time.monotonic())
            return actions

        self.update(decide)

    def why(self, error: CollectiveFailed) -> str:
        """What was cut says only that: why it was is known here."""
        reason = self.recovery.reason
        return reason if error.aborted and reason else str(error)

    def told(self, generation: int) -> None:
        """User code is about to be told that this generation is over; who is stranded by that says so, once."""
        self._told_in = generation
        self.update(Recovery.strand)

    def raise_if_told(self) -> None:
        """Raises what user code was told before in this world, and has caught."""
        if self._told_in == self.recovery.generation:
            self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raises PeerLost, or CollectiveFailed where no world follows, or what `raise_over` raises."""
        phase = self.recovery.phase
        if phase is Phase.TRAINING:
            return
        if phase is Phase.BROKEN:
            self.told(self.recovery.generation)
            if not self.recovers:
                raise CollectiveFailed(self.recovery.reason)
            raise PeerLost(self.recovery.reason)
        if phase is Phase.OVER:
            self.raise_over()

    @property
    def recovers(self) -> bool:
        """Whether another world follows one that broke. In a job of a fixed size one does for its last checkpoint."""
        return not self.alone and (self.env.elastic or self.recovery.ending.checkpoint_wanted)

    # ---- the end of this worker's part ---------------------------------------------------------------------------

    def raise_over(self) -> None:
        """There is no further world for this process: raises LeaveRequested, SystemExit, StateMismatch, JobFailed or
        JobOver.
        """
        message, reason = self.recovery.over, self.recovery.reason
        if isinstance(message, messages.Leave) and not message.fenced:
            if not self.recovery.running:
                raise SystemExit(0)  # outside elastic.run nobody else would catch it
            raise LeaveRequested(reason)
        if isinstance(message, messages.Rejected):
            raise StateMismatch(reason)
        if self.recovery.running:
            raise LeaveRequested(reason)  # the driver says why the job ended, once for all workers
        raise JobFailed(reason) if self.unheard else JobOver(reason)

    @property
    def asked_to_leave(self) -> bool:
        """Whether LeaveRequested means a graceful leave (exit code 0) and not the end of a failed job."""
        over = self.recovery.over
        return isinstance(over, messages.Leave) and not over.fenced

    @property
    def unheard(self) -> bool:
        """Whether only this worker can say why it ends: the driver is gone, or has long given it up."""
        over = self.recovery.over
        return self.lost_driver or (isinstance(over, messages.Leave) and over.fenced)

    def pause(self) -> None:
        """``shutdown()``: groups are kept until the next world or the exit, because a peer may still be in one."""
        self.groups.leave()
        self.account.begin("idle", time.monotonic())
        with self.lock:
            self.recovery.pause()
