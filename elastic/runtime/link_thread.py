"""Work of the link thread: handles the driver's messages, timers and SIGTERM."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic.errors import DriverLost
from elastic.monitoring import script_line, step_count
from elastic.monitoring.reporting import Reporting
from elastic.monitoring.timeline_transfer import TraceSession
from elastic.protocol import messages
from elastic.protocol.messages import Message, Place
from elastic.runtime import host_updates
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.driver_connection import CONNECT_S, Link
from elastic.runtime.failures import excepthook, stack_dump
from elastic.runtime.recovery import Phase
from elastic.runtime.session import Session
from elastic.runtime.world_entry import DriverWorlds

# interval in seconds between reports of this worker's time account, while it trains without a change
SPENT_S = 30.0
# in a job of fixed size, seconds after SIGTERM in which the driver may request a last checkpoint
STAY_S = 2.0
# SPENT_S on rank 0; shorter, because its reports also contain the job's progress
FIRST_SPENT_S = 5.0


class LinkThread:
    """Message handler and timers of one worker. `receive` and `poked` run in the link thread."""

    def __init__(
        self,
        session: Session,
        worlds: DriverWorlds,
        progress: ProgressCounter,
        tracing: TraceSession,
        reporting: Reporting | None,
    ) -> None:
        self._session = session
        self._worlds = worlds
        self._progress = progress
        self._tracing = tracing
        self._reporting = reporting
        if reporting is not None:
            session.when_lost(reporting.driver_lost)
        self.checkpoints: Callable[[Message], bool] = lambda message: False
        self._leave_asked = False
        # time at which this worker exits after SIGTERM, in a job of fixed size
        self._end_at = math.inf
        self._spent_sent_at = time.monotonic()
        # last training that was reported: its generation, and whether it was a second or later one
        self._training_sent = (0, False)
        # generation and number of the last planned change that listeners were notified of
        self._reported = (0, 0)

    # ---- startup -------------------------------------------------------------------------------------------------

    def connect(self, link: Link) -> None:
        """Send Hello to the driver and wait for its answer.

        Raises:
            DriverLost: the driver did not respond.
        """
        session = self._session
        stack_dump.answer()
        excepthook.arrange()
        link.start(self.receive, self.poked, session.driver_lost)
        with session.lock:
            session.recovery.place = Place(-1, 0, 0, 0, 0, 0)
        link.send(messages.Hello(session.env.worker, os.getpid(), str(torch.__version__)))
        deadline = time.monotonic() + CONNECT_S
        with session.changed:
            while session.recovery.place.rank < 0 and session.recovery.phase is not Phase.OVER:
                if not session.changed.wait(deadline - time.monotonic()):
                    raise DriverLost(
                        f"the driver assigned no rank within {CONNECT_S:g} s after this worker connected: check that"
                        " elasticrun is still running and that its host is not overloaded"
                    )
        if session.env.elastic:
            self.listen_for_sigterm()

    def listen_for_sigterm(self) -> None:
        """Install a handler for SIGTERM, unless the script has its own.

        In an elastic job, SIGTERM makes this worker leave at its next commit. In a job of fixed size, it ends this
        worker unless the driver requests a last checkpoint within `STAY_S`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._sigterm)

    def _sigterm(self, *_: Any) -> None:
        # The handler may interrupt this thread while it holds any lock, so it only sets a flag and writes a byte.
        self._leave_asked = True
        self._session.poke()

    # ---- work in the link thread ---------------------------------------------------------------------------------

    def poked(self) -> float:
        """Check all timers. This method is called at every poke and at least once a second.

        Return the seconds until the next check.
        """
        session, now = self._session, time.monotonic()
        session.pulse.beat(now)
        if self._leave_asked:
            self._leave_asked = False
            if session.env.elastic:
                session.update(lambda recovery: recovery.ask_to_leave("SIGTERM"))
            else:
                self._end_at = min(self._end_at, now + STAY_S)
        if now >= self._end_at and not session.recovery.ending.checkpoint_wanted:
            _die_of_sigterm()
        groups = session.groups
        news = self._progress.due_messages(
            now, groups.launches, script_line.of_thread, groups.followed_since
        )
        if session.env.elastic and session.recovery.phase is Phase.TRAINING:
            recovery = session.recovery
            news += self._progress.pace(now, recovery.generation, recovery.agreed())
        for message in news:
            session.send(message)
        self._tracing.due()
        trains = session.account.part in ("training", "committing", "data")
        training = session.recovery.generation, session.recovery.again
        began = trains and training != self._training_sent
        leads = session.recovery.phase is Phase.TRAINING and session.recovery.place.rank == 0
        if began or now - self._spent_sent_at >= (FIRST_SPENT_S if leads else SPENT_S):
            self._spent_sent_at = now
            if trains:
                self._training_sent = training
            session.send(self.time_spent())
        return self._progress.next_look_s(now)

    def time_spent(self) -> messages.TimeSpent:
        """Return a report of the time account up to now."""
        account = self._session.account
        part, times = account.part, account.times(time.monotonic())
        recovery = self._session.recovery
        holds = recovery.phase in (Phase.TRAINING, Phase.RETURNED)
        commit = recovery.agreed() if holds else None
        far = step_count.state_step, step_count.steps, step_count.batch
        sealed = recovery.sealed if holds else None
        every = step_count.commits_every
        return messages.TimeSpent(recovery.generation, times, part, commit, *far, sealed, every)

    def receive(self, message: Message) -> None:
        """Handle a message from the driver."""
        if self._tracing.receive(message):
            return
        if self._reporting is not None and self._reporting.receive(message):
            return
        session = self._session
        if isinstance(message, messages.CheckpointSoon):
            session.update(lambda recovery: recovery.receive(message))
        if self.checkpoints(message):
            return
        match message:
            case messages.HostsListed():
                host_updates.notify(time.time(), host_updates.HostUpdateResult.mixed)
                return
            case messages.Broken():
                session.phases.mark("broken", time.monotonic())
            case messages.World():
                if session.recovery.stands_by:
                    # Do not report the time that this worker has waited as a standby, which may be hours.
                    session.phases.mark("ready", time.monotonic())
                session.phases.mark("world", time.monotonic())
                if session.account.part == "idle":
                    session.account.begin("joining", time.monotonic())
            case messages.Finish():  # After this message, the worker holds no commit.
                session.send(self.time_spent())
            case messages.Locate():
                main = threading.main_thread().ident or 0
                line = script_line.of_thread(self._progress.thread or main)
                session.send(messages.Located(session.recovery.generation, line))
                return
            case messages.Awaited(generation, rank, line):
                self._progress.add_awaited(generation, rank, line)
                return
            case messages.Restate():
                self._worlds.restate()
        session.update(lambda recovery: recovery.receive(message))
        match message:
            case messages.StandBy() if session.recovery.stands_by:
                session.account.begin("idle", time.monotonic())
            case messages.Restate() if self._reporting is not None:
                self._reporting.resend()
            case messages.Prepare() if message.generation == session.recovery.generation:
                self._notify_of_change(message)

    def _notify_of_change(self, message: messages.Prepare) -> None:
        """Notify listeners of a planned change, once per change: the driver may repeat the message."""
        if (message.generation, message.change) > self._reported:
            self._reported = message.generation, message.change
            host_updates.notify(time.time(), host_updates.HostUpdateResult.mixed)


def _die_of_sigterm() -> None:
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
