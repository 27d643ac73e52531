"""The worker's shell: the present world, its groups of collectives, its link to the driver. Acts; `recovery` decides.

One lock guards the `Recovery` object and wakes who waits for it. The link thread may cut groups at
any time and takes no other lock, so that nothing that a collective or the forming of a group holds
can delay it. User code is interrupted only in the training thread, at the places documented in
`run_loop`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elastic.collectives import own_gpu
from elastic.collectives.interface import Collectives
from elastic.collectives.local import LocalCollectives
from elastic.errors import (
    CollectiveFailed,
    DriverLost,
    JobFailed,
    JobOver,
    LeaveRequested,
    PeerLost,
    StateMismatch,
    WorldChanging,
)
from elastic.failpoints import failpoint
from elastic.monitoring import timeline
from elastic.monitoring.reporting import Reporting
from elastic.monitoring.tracing import TraceSession, TracingThroughDriver, TracingToFile
from elastic.negotiation.engine import Engine
from elastic.protocol import messages
from elastic.protocol.messages import Address, Message, Place
from elastic.rendezvous import find_rank0
from elastic.rendezvous.environment import Environment
from elastic.rendezvous.store import Store
from elastic.runtime import excepthook, host_updates, recovery, stack_dump
from elastic.runtime.link import CONNECT_S, Link
from elastic.runtime.process_groups import Groups
from elastic.runtime.progress import ProgressCounter
from elastic.runtime.recovery import (
    Cut,
    Phase,
    Recovery,
    Send,
    Verdict,
)
from elastic.runtime.recovery_phases import Phases

HOLD_S = 60.0  # at a check, for the driver's word; it withdraws a change itself long before
WAIT_SAID_S = 30.0  # how often a long wait says what it waits for
ASLEEP_S = 3.0  # the link thread, which wakes once a second: the process did not run
DRAIN_S = 1.0  # for aborted collectives to end; they take milliseconds


class Runtime:
    """One per process. ``place``, ``generation`` and ``activity`` may be read from any thread."""

    def __init__(self, env: Environment, link: Link | None) -> None:
        self.env = env
        self.timeout_s = env.timeout_s
        self.elastic = env.elastic
        self.activity = 0  # grows with everything that may change tensors
        self._link = link
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._recovery = Recovery()
        self._groups = Groups(env, over=lambda: self.broken)
        self.tracing: TraceSession = (
            TracingToFile(env) if link is None else TracingThroughDriver(env, self._send, link.poke)
        )
        self.reporting = None if link is None else Reporting(self._send)
        self._progress = ProgressCounter()
        self._phases = Phases()
        self._layout: messages.Layout | None = None  # the last one sent
        self._trains_in: int | None = None  # the thread that is in elastic.run
        self._leave_asked = False
        self._warned_alone = False
        self._told_of = (0, 0)  # the planned change that listeners know of
        self._told_in = 0  # the generation whose end has been raised in user code
        self.lost_driver = False  # nobody else will say why this worker ends
        self._awake_at = 0.0  # the link thread was last; 0: it does not run yet
        self._slept_s = self._woke_at = 0.0

    # ---- what others read ------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        return self._recovery.place

    @property
    def generation(self) -> int:
        return self._recovery.generation

    @property
    def world(self) -> messages.World | None:
        return self._recovery.world

    @property
    def broken(self) -> bool:
        """Whether the present generation is over. From any thread."""
        return self._recovery.phase in (Phase.BROKEN, Phase.OVER)

    @property
    def running(self) -> bool:
        return self._recovery.running

    @property
    def provisional(self) -> bool:
        """Whether this worker is in no world yet: its collectives act as in a world of one."""
        return self._recovery.provisional

    @property
    def alone(self) -> bool:
        """No driver: a world of one, or a static world without recovery."""
        return self._link is None

    # ---- starting --------------------------------------------------------------------------------

    def connect(self) -> None:
        """Introduces this process to the driver and waits for its answer. Raises DriverLost."""
        assert self._link is not None
        stack_dump.answer()
        excepthook.arrange()
        self._link.start(self._receive, self._poked, self._driver_lost)
        with self._lock:
            self._recovery.place = Place(-1, 0, 0, 0, 0, 0)
        self._link.send(messages.Hello(self.env.worker, os.getpid(), str(torch.__version__)))
        deadline = time.monotonic() + CONNECT_S
        with self._changed:
            while self._recovery.place.rank < 0 and self._recovery.phase is not Phase.OVER:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise DriverLost(f"the driver did not answer within {CONNECT_S:g} s")
        if self.elastic:
            self._listen_for_sigterm()

    def first_world(self) -> None:
        """Waits for the first world, unless one trains already: then the place stays
        provisional.
        """
        with self._lock:
            if self._recovery.newcomer:
                return
        self._wait_for_world("")

    # ---- worlds of a fixed size, without a driver ------------------------------------------------

    def form_fixed_world(
        self, store: Store, rank: int, size: int, told: int | None, generation: int
    ) -> None:
        """With all that come to ``store``, which is that of the world before. Raises CollectiveFailed."""
        mine = self._groups.listen() if rank == 0 else None
        timeout_s = self.env.collective_timeout_s
        place, address = find_rank0.arrive(store, rank, size, told, mine, timeout_s)
        world = messages.World(generation, place, address, 0, None, "no driver")
        self._groups.retire()
        self.begin_fixed_world(world)

    def begin_fixed_world(self, world: messages.World) -> None:
        with self._lock:
            self._recovery = Recovery(
                phase=Phase.TRAINING,
                generation=world.generation,
                place=world.place,
                provisional=False,
                world=world,
            )
        self._groups.open(world, self._engine_broke(world.generation))

    def next_fixed_world(self) -> None:
        """``init()`` after ``shutdown()``: of the same ranks. Raises CollectiveFailed."""
        place, store = self.place, self._groups.store
        assert store is not None, "a fixed world has a store"
        try:
            self.form_fixed_world(
                store, place.rank, place.size, place.local_rank, self.generation + 1
            )
        except CollectiveFailed as error:
            raise CollectiveFailed(
                f"the {place.size} ranks did not all call init() again: {error}"
            ) from error

    # ---- starting under a driver -----------------------------------------------------------------

    def _listen_for_sigterm(self) -> None:
        """SIGTERM asks this worker to leave at its next commit, unless the script has a handler of
        its own.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._sigterm)

    def _sigterm(self, *_: Any) -> None:
        # Only a flag and a byte: a handler may run while this very thread holds any lock.
        self._leave_asked = True
        if self._link is not None:
            self._link.poke()

    def _poked(self) -> None:
        """In the link thread: at every poke, and once a second."""
        now = time.monotonic()
        if self._awake_at and now - self._awake_at > ASLEEP_S:
            self._slept_s, self._woke_at = now - self._awake_at, now
        self._awake_at = now
        if self._leave_asked:
            self._leave_asked = False
            with self._lock:
                actions = self._recovery.ask_to_leave("SIGTERM")
            self._perform(actions)
        news = self._progress.tell(now, self._groups.launches)
        if self.elastic and self._recovery.phase is Phase.TRAINING:
            news += self._progress.pace(now, self._recovery.agreed())
        for message in news:
            self._send(message)
        self.tracing.due()

    # ---- the link thread -------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        if self.tracing.receive(message):
            return
        if self.reporting is not None and self.reporting.receive(message):
            return
        if isinstance(message, messages.HostsListed):
            host_updates.tell(time.time(), host_updates.HostUpdateResult.mixed)
            return
        if isinstance(message, messages.Broken):
            self._phases.mark("broken", time.monotonic())
        with self._changed:
            actions = self._recovery.receive(message)
            if isinstance(message, messages.World):
                self._phases.mark("world", time.monotonic())
            self._changed.notify_all()
        restate = isinstance(message, messages.Restate)
        if restate and self._layout is not None:
            self._send(self._layout)
        self._perform(actions)
        if restate and self.reporting is not None:
            self.reporting.say_again()
        if isinstance(message, messages.Prepare) and message.generation == self.generation:
            self._tell_of_change(message)

    def _tell_of_change(self, message: messages.Prepare) -> None:
        """Once for each change: the driver may ask again."""
        if (message.generation, message.change) > self._told_of:
            self._told_of = message.generation, message.change
            host_updates.tell(time.time(), host_updates.HostUpdateResult.mixed)

    def _driver_lost(self, reason: str) -> None:
        if self._slept_s and time.monotonic() - self._woke_at < ASLEEP_S:
            why = f"it did not run for {self._slept_s:.0f} s, and the others go on without it"
            reason = f"this worker was fenced: {why} ({reason})"
        else:
            reason = f"this worker was fenced, or elasticrun is gone: {reason}"
        with self._changed:
            actions = self._recovery.driver_lost(reason)
            self.lost_driver = self.lost_driver or bool(actions)
            self._changed.notify_all()
        self._perform(actions)
        if self.reporting is not None:
            self.reporting.driver_lost()

    def _perform(self, actions: list[recovery.Action]) -> None:
        for action in actions:
            match action:
                case Cut(generation):
                    self._cut(generation)
                case Send(message):
                    self._send(message)

    def _send(self, message: Message) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except DriverLost as error:
            self._driver_lost(str(error))

    def _cut(self, generation: int) -> None:
        failpoint("cut")
        self._groups.cut(generation)

    # ---- worlds ----------------------------------------------------------------------------------

    def _wait_for_world(self, layout: str) -> messages.World:
        """Says ready, waits for a world and takes its place. Raises what ends the wait
        otherwise.
        """
        self._groups.make_room()
        store = self._groups.listen()
        with self._lock:
            actions = self._recovery.wait_for_world(store, layout)
        self._phases.mark("ready", time.monotonic())
        self._perform(actions)
        failpoint("rendezvous")
        self._wait_while(Phase.WAITING, "to form a world")
        with self._lock:
            phase, world = self._recovery.phase, self._recovery.world
        if phase is Phase.OVER:
            self._raise_over()
        if phase is Phase.OUTSIDE:  # the first world was formed without this worker
            return messages.World(
                0, self.place, Address("", 0), holders=0, commit=None, reason="newcomer"
            )
        assert world is not None
        self._groups.retire()
        self._groups.open(world, self._engine_broke(world.generation))
        return world

    def _wait_while(self, phase: Phase, what: str) -> None:
        """For the driver's word. Bounded by the driver, which counts its own deadlines, by its connection, whose loss
        is noticed, and by ``wait_timeout_s``, should the driver be frozen. Raises DriverLost.
        """
        began = said_at = time.monotonic()
        waits = f"{self.env.worker} waits for the driver {what}"
        with self._changed:
            while self._recovery.phase is phase:
                self._changed.wait(1.0)
                now = time.monotonic()
                if now - began > self.env.wait_timeout_s:
                    raise DriverLost(
                        f"{waits}, in vain for {self.env.wait_timeout_s:g} s: is elasticrun stopped,"
                        " or its host cut off?"
                    )
                if now - said_at > WAIT_SAID_S:
                    said_at = now
                    print(f"elastic: {waits}", file=sys.stderr)

    def enter(self) -> None:
        """``elastic.run`` begins. Raises JobFailed if the job's training is over already."""
        if self._link is not None and self._recovery.phase is Phase.FINISHED:
            raise JobFailed(
                "every worker has returned from elastic.run, and with that the job ends: put all"
                " training into one function under elastic.run"
            )
        with self._lock:
            self._recovery.enter()
        self._trains_in = threading.get_ident()

    def leave(self) -> None:
        """``elastic.run`` is over."""
        with self._lock:
            self._recovery.leave()
        self._trains_in = None

    def next_world(self, layout: str, text: str) -> messages.World:
        """From inside ``elastic.run``: says ready with the state's layout, and waits. Raises
        PeerLost and others.
        """
        if self._layout is None or layout != self._layout.digest:
            self._layout = messages.Layout(layout, text)
            self._send(self._layout)
        return self._wait_for_world(layout)

    def adopt(self, copied_bytes: int) -> None:
        """State is equal everywhere: from here a loss rolls back to this point, not further."""
        with self._lock:
            self._recovery.adopt()
        self._progress.begin_training()
        self._phases.copied_bytes = copied_bytes
        self._phases.mark("synced", time.monotonic())

    def forget_commit(self) -> None:
        with self._lock:
            self._recovery.forget_commit()

    def committed(self) -> None:
        """A state was saved."""
        with self._lock:
            self._recovery.committed()

    def committed_alone(self) -> None:
        """A state was saved by a worker whose script gave the world up; see `Recovery`."""
        with self._lock:
            self._recovery.committed_alone()

    def may_commit(self) -> None:
        """Raises what user code was told before in this world, and has caught: its step was cut short."""
        if self._told_in == self.generation:
            self._raise_if_broken()

    def check(self) -> None:
        """One numbered check. Raises WorldChanging, PeerLost or LeaveRequested; usually returns at
        once.
        """
        if self._link is None or not self._recovery.running:
            return
        deadline = None
        with self._changed:
            verdict = self._recovery.arrive()
            while verdict is Verdict.HOLD:
                deadline = deadline or time.monotonic() + HOLD_S
                if not self._changed.wait(deadline - time.monotonic()):
                    self._recovery.release()
                verdict = self._recovery.verdict()
        if self.place.size == 1:
            self._resumed()
        match verdict:
            case Verdict.STOP:
                self._phases.mark("broken", time.monotonic())
                raise WorldChanging("a planned change of the world")
            case Verdict.BROKEN:
                raise PeerLost(self._recovery.reason)
            case Verdict.OVER:
                self._raise_over()

    def returned(self) -> None:
        """Says that the function returned; waits for the others. Raises PeerLost if one of them is
        lost first.
        """
        if self._link is None:
            return
        with self._lock:
            actions = self._recovery.returned()
        self._perform(actions)
        self._wait_while(Phase.RETURNED, "to say that all have returned")
        phase = self._recovery.phase
        if phase is Phase.BROKEN:
            raise PeerLost(self._recovery.reason)
        if phase is Phase.OVER:
            self._raise_over()

    def raised(self, summary: str, traceback: str, hardware: bool = False) -> None:
        """Tells the driver why this process is about to end. ``hardware``: see `elastic.runtime.hardware_errors`."""
        if self._link is None:
            return
        with self._lock:
            actions = self._recovery.raised(summary, traceback, hardware)
        self._perform(actions)

    def quits(self, code: object) -> None:
        """Tells the driver that this process is about to exit, for ``SystemExit(code)``. The end of an interpreter with
        torch in it takes seconds, and its sockets stay open for as long; the others need not wait for that.
        """
        if self._link is None or not self.elastic:
            return  # in a static job the exit itself is the verdict
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        with self._lock:
            actions = self._recovery.quit(status)
        self._perform(actions)

    def report_digest(
        self, digest: int, buffers: int, samples: Sequence[int] = (), epoch: int = 0
    ) -> None:
        """``samples``: ids that this rank has trained on since its last commit, in tests."""
        commit = self._recovery.newest
        if commit is not None and digest and self._recovery.running:
            generation = self.generation
            self._send(messages.Digested(generation, commit, digest, buffers, list(samples), epoch))

    def send(self, message: Message) -> None:
        """To the driver, after everything that this thread sent before."""
        self._send(message)

    def _raise_over(self) -> None:
        message, reason = self._recovery.over, self._recovery.reason
        if isinstance(message, messages.Leave) and not message.fenced:
            if not self._recovery.running:
                raise SystemExit(0)  # outside elastic.run nobody else would catch it
            raise LeaveRequested(reason)
        if isinstance(message, messages.Rejected):
            raise StateMismatch(reason)
        if self._recovery.running:
            raise LeaveRequested(reason)  # the driver says why the job ended, once for all workers
        raise JobFailed(reason) if self.unheard else JobOver(reason)

    @property
    def asked_to_leave(self) -> bool:
        """Whether LeaveRequested means a graceful leave (exit code 0) and not the end of a failed
        job.
        """
        over = self._recovery.over
        return isinstance(over, messages.Leave) and not over.fenced

    @property
    def unheard(self) -> bool:
        """Whether only this worker can say why it ends: the driver is gone, or has long given it up."""
        over = self._recovery.over
        return self.lost_driver or (isinstance(over, messages.Leave) and over.fenced)

    # ---- collectives -----------------------------------------------------------------------------

    def group(
        self, purpose: str, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> Collectives:
        """The group for a purpose, made at its first use. Collective among ``ranks`` (all, by
        default).

        Raises PeerLost if it can't be made, because a rank is gone or does not come within the
        timeout.
        """
        self._raise_if_broken()
        place, generation = self.place, self.generation
        if self._recovery.provisional:
            return self.alone_group()
        members = tuple(range(place.size)) if ranks is None else ranks
        if len(members) == 1:
            return LocalCollectives()
        own_gpu.meet(device)
        key = (purpose, device.type, members)
        group = self._groups.find(key)
        if group is not None:
            return group
        began = time.monotonic()
        try:
            with self._inside(generation, f"forming the {purpose} group"):
                group = self._groups.form(key, generation, place)
        except CollectiveFailed as error:
            self.mark_broken(generation, f"no {purpose} group: {error}")
            self._told_in = generation
            self._strand()
            if self.alone or not self.elastic:
                raise CollectiveFailed(self._why(error)) from error
            raise PeerLost(self._why(error)) from error
        self._phases.formed(time.monotonic() - began)
        return group

    def wanted(self, purpose: str, device_type: str, ranks: tuple[int, ...] | None = None) -> bool:
        """Whether others are forming this group and wait for this rank. Asks rank 0; not for every step."""
        place = self.place
        if self.provisional or place.size == 1:
            return False
        members = tuple(range(place.size)) if ranks is None else ranks
        return self._groups.wanted((purpose, device_type, members), self.generation, place)

    def alone_group(self) -> Collectives:
        """Of this rank only."""
        if self._recovery.provisional and self.place.size > 1 and not self._warned_alone:
            self._warned_alone = True
            warnings.warn(
                "a world is training already and this worker has not joined it yet: collectives"
                " before elastic.run act as in a world of one",
                stacklevel=3,
            )
        return LocalCollectives()

    def engine(self) -> Engine:
        """What runs the collectives that are called by name. Call it under `guard`. Raises CollectiveFailed."""
        generation = self.generation
        return self._groups.engine(generation, self.place, self._engine_broke(generation))

    def _engine_broke(self, generation: int) -> Callable[[str], None]:
        def broken(reason: str) -> None:
            self.mark_broken(generation, reason)

        return broken

    def guard(self, name: str) -> Guard:
        """Around collectives in the training thread: turns CollectiveFailed into PeerLost and tells
        the driver. ``name``: by which the log calls a wait in there.
        """
        return Guard(self, name)

    def _enter_guard(self, name: str) -> int:
        self.activity += 1
        generation = self.generation
        self._raise_if_broken()
        self._progress.enter(generation, name, time.monotonic())
        return generation

    def _leave_guard(self, generation: int, error: BaseException | None) -> None:
        if self._progress.leave(time.monotonic()) and self._link is not None:
            self._link.poke()
        if error is None:
            self._resumed()
        elif isinstance(error, CollectiveFailed):
            self.mark_broken(generation, str(error))
            if self.alone or not self.elastic:
                if str(error) != self._why(error):
                    raise CollectiveFailed(self._why(error)) from error
                return
            self._told_in = generation
            self._strand()  # unsaid so far if the driver's word came before the error
            raise PeerLost(self._why(error)) from error

    def _why(self, error: CollectiveFailed) -> str:
        """What was cut says only that: why it was is known here."""
        reason = self._recovery.reason
        return reason if error.aborted and reason else str(error)

    @contextlib.contextmanager
    def _inside(self, generation: int, name: str) -> Iterator[None]:
        progress = self._progress
        progress.enter(generation, name, time.monotonic())
        try:
            yield
        finally:
            if progress.leave(time.monotonic()) and self._link is not None:
                self._link.poke()

    @contextlib.contextmanager
    def long_phase(self, name: str) -> Iterator[None]:
        """See `elastic.long_phase`."""
        if self._trains_in not in (None, threading.get_ident()):
            warnings.warn(
                f"long_phase({name!r}) has no effect here: it counts in the thread that trains",
                stacklevel=4,
            )
            yield
            return
        before, message = self._progress.begin_phase(name)
        self._send(message)
        try:
            yield
        finally:
            self._send(self._progress.end_phase(before))

    def _raise_if_broken(self) -> None:
        if self._recovery.phase is Phase.BROKEN:
            self._told_in = self.generation
            self._strand()
            if self.alone or not self.elastic:
                raise CollectiveFailed(self._recovery.reason)
            raise PeerLost(self._recovery.reason)
        if self._recovery.phase is Phase.OVER:
            self._raise_over()

    def _strand(self) -> None:
        with self._lock:
            actions = self._recovery.strand()
        self._perform(actions)

    def mark_broken(self, generation: int, reason: str) -> None:
        """A collective of this generation failed: cuts the rest, tells the driver. From any thread;
        never raises.
        """
        with self._changed:
            actions = self._recovery.fail(generation, reason)
            self._changed.notify_all()
        if actions:
            self._phases.mark("broken", time.monotonic())
        self._perform(actions)

    def fail_world(self, reason: str) -> None:
        """User code gave this world up (it raised HorovodInternalError): regroup with everybody."""
        self.mark_broken(self.generation, reason)

    # ---- phases of a recovery, for the report ----------------------------------------------------

    def drain(self) -> None:
        """After a loss: waits until no collective of the old world writes into any tensor. Raises DeviceLost."""
        for _ in range(self._groups.drain(DRAIN_S)):
            warnings.warn(
                f"a collective of generation {self.generation} still ran {DRAIN_S:g} s after"
                " it was aborted",
                stacklevel=2,
            )

    def mark_raised(self) -> None:
        """The training thread has come back to ``elastic.run``."""
        self._phases.raised(time.monotonic())
        if timeline.on:
            timeline.end_all()

    def mark_restored(self) -> None:
        self._phases.restored(time.monotonic())

    def _resumed(self) -> None:
        if self._link is None or not self._recovery.running:
            return
        report = self._phases.stepped(self.generation, time.monotonic())
        if report is not None:
            with self._lock:
                actions = self._recovery.resumed(*report)
            self._perform(actions)
            if timeline.on:
                for name, begin, end in self._phases.spans:
                    timeline.span("recovery", name, round(begin * 1e9), round(end * 1e9))

    # ---- the end ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """``shutdown()``: groups are kept until the next world or the exit, because a peer may
        still be in one.
        """
        self._groups.leave()
        with self._lock:
            self._recovery.pause()

    def close(self) -> None:
        """At exit, in which user code may still take its time.

        Link and sockets end with the process. Peers that lost them sooner would report a failure whose cause, the exit
        code of this worker, nobody can know yet; and a worker whose link is gone is taken for lost.
        """
        self.tracing.close()
        if self.reporting is not None:
            self.reporting.close()
        if not self.elastic and not self.broken:
            self._groups.leave()
        self._groups.close()

    def forget(self) -> None:
        """In a forked child (a DataLoader worker): hold none of the parent's sockets."""
        if self._link is not None:
            self._link.forget()
        self._groups.forget()


class Guard:
    """See `Runtime.guard`. No generator, because every collective pays for it."""

    __slots__ = ("_generation", "_name", "_runtime")

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._generation = 0

    def __enter__(self) -> None:
        self._generation = self._runtime._enter_guard(self._name)

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        self._runtime._leave_guard(self._generation, error)
