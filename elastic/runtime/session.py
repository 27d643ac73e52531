"""Session of a worker in its job: runs the `Recovery` state machine under a lock and executes its decisions.

A single lock guards the state machine, and its condition wakes waiting threads. The link thread takes no other lock to
abort groups, so neither a collective nor the creation of a group can delay it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from elastic.errors import (
    CollectiveFailed,
    DriverLost,
    JobOver,
    LeaveRequested,
    PeerLost,
    StateMismatch,
    WorkerOrphaned,
)
from elastic.failpoints import failpoint
from elastic.monitoring import timeline
from elastic.monitoring.time_account import TimeAccount
from elastic.protocol import messages
from elastic.protocol.calls import Called
from elastic.protocol.messages import Message
from elastic.rendezvous.worker_settings import Environment
from elastic.runtime.driver_connection import Link
from elastic.runtime.process_groups import Groups
from elastic.runtime.recovery import AbortGroups, Action, Phase, Recovery, Send
from elastic.runtime.recovery_phases import Phases

WAIT_LOG_S = 30.0  # interval in seconds between log lines about a long wait
# seconds between two wake-ups of the link thread after which the process is assumed to have been stopped
ASLEEP_S = 3.0
ENDED = (Phase.BROKEN, Phase.OVER)


class Pulse:
    """Detector of periods in which this process was stopped.

    The link thread calls it at each wake-up, at least once a second.
    """

    def __init__(self) -> None:
        self._awake_at = 0.0  # time of the last wake-up, or 0 before the first
        self._slept_s = self._woke_at = 0.0

    def beat(self, now: float) -> None:
        if self._awake_at and now - self._awake_at > ASLEEP_S:
            self._slept_s, self._woke_at = now - self._awake_at, now
        self._awake_at = now

    def slept_s(self, now: float) -> float:
        """Return the number of seconds for which the process was stopped if it has just resumed, else 0."""
        return self._slept_s if now - self._woke_at < ASLEEP_S else 0.0


class Session:
    """Session of a process in its job, from ``init()`` until it exits, across all worlds.

    ``recovery`` may be read from any thread. Change it with `update`, or under ``lock`` if no thread has to be woken
    and no action follows. ``changed`` is the lock's condition.
    """

    def __init__(self, env: Environment, link: Link | None) -> None:
        self.env = env
        # True without a driver, in a world of one worker or in a static world that cannot recover
        self.alone = link is None
        self.recovery = Recovery()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.groups = Groups(env, over=lambda: self.broken)
        self.phases = Phases()
        self.account = TimeAccount(time.monotonic())
        self.pulse = Pulse()
        # whether this worker has lost the driver, so that only the worker itself can report why it exits
        self.lost_driver = False
        self._link = link
        self._when_lost: Callable[[], None] = lambda: None
        # last generation whose failure or end was raised as an exception in user code
        self._raised_in = 0

    # ---- the state machine ---------------------------------------------------------------------------------------

    def update(self, decide: Callable[[Recovery], list[Action]]) -> None:
        """Change the state machine, wake waiting threads and execute the actions that it returns. Thread-safe."""
        with self.changed:
            actions = decide(self.recovery)
            self.changed.notify_all()
        for action in actions:
            match action:
                case AbortGroups(generation):
                    failpoint("cut")
                    self.groups.cut(generation)
                case Send(message):
                    self.send(message)

    def wait_while(self, phase: Phase, what: str) -> None:
        """Wait for the driver until the state machine leaves a phase.

        The wait ends at the latest at the driver's own deadlines, when its connection is lost, or after
        ``wait_timeout_s`` if the driver is frozen. A standby waits for as long as it has a connection.

        Raises:
            DriverLost: the driver did not respond.
        """
        began = logged_at = time.monotonic()
        waits = f"{self.env.worker} waits for the driver {what}"
        with self.changed:
            while self.recovery.phase is phase:
                self.changed.wait(1.0)
                now = time.monotonic()
                if self.recovery.stands_by:
                    began = logged_at = now
                if now - began > self.env.wait_timeout_s:
                    raise DriverLost(
                        f"{waits}: the driver has not responded for {self.env.wait_timeout_s:g} s. Check that"
                        " elasticrun is running and that its host is reachable"
                    )
                if now - logged_at > WAIT_LOG_S:
                    logged_at = now
                    print(f"elastic: {waits}", file=sys.stderr)

    def resumed(self) -> None:
        """Record a completed collective or local step.

        The first one of user code in a generation is reported to the driver.
        """
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
        """Send a message to the driver. Messages of one thread arrive in the order of its calls.

        This method does nothing without a driver. It never raises.
        """
        if self._link is None:
            return
        try:
            self._link.send(message)
        except DriverLost as error:
            self.driver_lost(str(error))

    def poke(self) -> None:
        """Wake the link thread, if it exists. This method is safe in a signal handler."""
        if self._link is not None:
            self._link.poke()

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Set the callback for the loss of the driver. It may be called more than once."""
        self._when_lost = callback

    def driver_lost(self, reason: str) -> None:
        """Handle the loss of the connection to the driver. Thread-safe. This method never raises."""
        slept_s = self.pulse.slept_s(time.monotonic())
        if slept_s:
            why = f"it did not run for {slept_s:.0f} s, and the other workers continued without it"
            lost_because = f"this worker was fenced: {why} ({reason})"
        else:
            lost_because = f"this worker was fenced, or elasticrun is gone: {reason}"

        def decide(recovery: Recovery) -> list[Action]:
            actions = recovery.driver_lost(lost_because)
            self.lost_driver = self.lost_driver or bool(actions)
            return actions

        self.update(decide)
        self._when_lost()

    # ---- the end of a world --------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Return whether the current world has failed or ended. Thread-safe."""
        return self.recovery.phase in ENDED

    def mark_broken(self, generation: int, reason: str, calls: tuple[Called, ...] = ()) -> None:
        """Report that a collective of this generation has failed.

        This method aborts all other collectives, and notifies the driver. Thread-safe. This method never raises.

        Args:
            generation: generation of the collective.
            reason: reason for the log.
            calls: the ranks' differing calls, if they are the cause.
        """

        def decide(recovery: Recovery) -> list[Action]:
            actions = recovery.fail(generation, reason, calls)
            if actions:
                self.phases.mark("broken", time.monotonic())
            return actions

        self.update(decide)

    def why(self, error: CollectiveFailed) -> str:
        """Return the reason for the failure of a collective. The error of an aborted collective does not contain it."""
        reason = self.recovery.reason
        return reason if error.aborted and reason else str(error)

    def record_raised(self, generation: int) -> None:
        """Record that user code receives an exception for the end of this generation.

        If the worker cannot recover, this is reported to the driver, once.
        """
        self._raised_in = generation
        self.update(Recovery.strand)

    def raise_if_ended(self) -> None:
        """Raise the world's error again if user code has caught it."""
        if self._raised_in == self.recovery.generation:
            self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raise an error if the current world has failed or ended.

        Raises:
            PeerLost: the world has failed, and another one follows.
            CollectiveFailed: the world has failed, and no other one follows.
            JobOver: the job has ended. `raise_over` lists the other errors.
        """
        phase = self.recovery.phase
        if phase is Phase.TRAINING:
            return
        if phase is Phase.BROKEN:
            self.record_raised(self.recovery.generation)
            if not self.recovers:
                raise CollectiveFailed(self.recovery.reason)
            raise PeerLost(self.recovery.reason)
        if phase is Phase.OVER:
            self.raise_over()

    @property
    def recovers(self) -> bool:
        """Return whether another world follows when a world fails.

        In a static job, another world is formed only for the last checkpoint.
        """
        return not self.alone and (self.env.elastic or self.recovery.ending.checkpoint_wanted)

    # ---- the end of this worker's participation ------------------------------------------------------------------

    def raise_over(self) -> None:
        """Raise the error with which this process leaves the job.

        Raises:
            LeaveRequested: the worker received a request to leave, and is inside elastic.run.
            SystemExit: the worker received a request to leave, and is outside elastic.run.
            StateMismatch: the driver has rejected the worker's state.
            WorkerOrphaned, JobOver: the worker was orphaned, or the job has ended.
        """
        message, reason = self.recovery.over, self.recovery.reason
        if isinstance(message, messages.Leave) and not message.fenced:
            if not self.recovery.running:
                raise SystemExit(0)  # no code outside elastic.run would catch LeaveRequested
            raise LeaveRequested(reason)
        if isinstance(message, messages.Rejected):
            raise StateMismatch(reason)
        if self.recovery.running:
            raise LeaveRequested(reason)  # the driver reports the reason, once for all workers
        raise WorkerOrphaned(reason) if self.must_report else JobOver(reason)

    @property
    def asked_to_leave(self) -> bool:
        """Return whether LeaveRequested means a graceful exit (exit code 0) rather than the failure of the job."""
        over = self.recovery.over
        return isinstance(over, messages.Leave) and not over.fenced

    @property
    def must_report(self) -> bool:
        """Return whether this worker itself must report why it exits: it lost the driver, or was fenced."""
        over = self.recovery.over
        return self.lost_driver or (isinstance(over, messages.Leave) and over.fenced)

    def pause(self) -> None:
        """Leave the world in ``shutdown()``.

        This method keeps groups until the next world or the exit, because peers may still use them.
        """
        self.groups.leave()
        self.account.begin("idle", time.monotonic())
        with self.lock:
            self.recovery.pause()
