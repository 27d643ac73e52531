"""Negotiation engine: all ranks agree on one order of the script's collectives, and start them in that order."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

import torch

from elastic.collectives.interface import Collectives
from elastic.errors import CollectiveFailed
from elastic.monitoring import script_line, timeline
from elastic.negotiation import fusion
from elastic.negotiation.execution import start
from elastic.negotiation.messages import (
    ALL,
    JOIN,
    LEAVE,
    NOTIFY,
    WAIT,
    Members,
    Request,
    RequestList,
    ResponseList,
)
from elastic.negotiation.pending import Pending
from elastic.negotiation.rank0_transport import LocalController, silence_s
from elastic.negotiation.response_cache import ResponseCache
from elastic.negotiation.transport import ControllerClient, encode_rules, fetch_rules, rules_of
from elastic.protocol.messages import Place
from elastic.rendezvous.store import Store, listen
from elastic.rendezvous.worker_settings import Environment

# After this many seconds without a decision, a thread reports which collective it waits for: other ranks may be blocked
# in another one.
BLOCKED_S = 0.3
LEAVE_S = 0.3  # timeout in seconds for sending the leave message to rank 0
_MOST_CYCLES = 5  # maximum number of cycles to wait while more collectives are being submitted
# maximum time in seconds to wait for another thread to execute decisions that it has received
DRAIN_S = 0.2
# interval in seconds at which a thread rechecks its condition while another thread drives the engine
_SLICE_S = 0.05


class Engine:
    """Engine that negotiates the named collectives of one generation with the other ranks, and starts them.

    Args:
        group_for: called with the name of a group, a device and the members; returns the process group that transfers
            the data.
        broken: called with the reason when the world fails.
    """

    def __init__(
        self,
        *,
        generation: int,
        place: Place,
        store: Store,
        env: Environment,
        group_for: Callable[[str, torch.device, Members], Collectives],
        broken: Callable[[str], None],
    ) -> None:
        self.generation = generation
        self._place = place
        self._store = store
        self._env = env
        self._group_for = group_for
        self._broken = broken
        self._limits = fusion.FusionLimits(
            fusion.FUSION_BYTES if env.fusion_bytes is None else env.fusion_bytes,
            groups=env.group_fusion,
        )
        self._caches: dict[Members, ResponseCache[Pending]] = {}
        self._fresh: set[Members] = set()  # process sets with unsent requests
        self._unnamed: dict[tuple[Members, str], int] = {}
        self._joins = 0  # number of times that all ranks of the world have joined
        self._undecided = 0
        self._listener: Callable[[Request], None] | None = None
        self._undelivered: list[Request] = []  # notifications not yet passed to the listener
        self._submitters: set[int] = set()  # IDs of the threads that have submitted collectives
        self._lock = threading.Lock()  # guards the fields above, from ``_limits`` on
        self._delivering = threading.Lock()
        self._sending = threading.Lock()
        self._driving = threading.Lock()
        self._carrying = threading.Lock()
        self._changed = threading.Condition()
        self._resting = False
        self._line: ControllerClient | LocalController | None = None
        self._failure: CollectiveFailed | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._nudged = False
        self._left = False
        # whether requests or decisions were taken from a queue and not passed on yet, so that an interruption would
        # lose them
        self._midway = False
        self._thread: threading.Thread | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    # ---- submission ------------------------------------------------------------------------------------------------

    def submit(self, pending: Pending, soon: bool) -> None:
        """Queue a collective for negotiation.

        Args:
            pending: the collective.
            soon: whether the caller is about to wait for the collective.

        Raises:
            CollectiveFailed: the world has ended.
        """
        pending.submitted_to(self)
        members = pending.members
        with self._lock:
            if self._failure:
                raise self._failure.again()
            self._submitters.add(threading.get_ident())
            if not pending.name:
                number = self._unnamed.get((members, pending.kind), 0)
                self._unnamed[members, pending.kind] = number + 1
                pending.name = f"{pending.kind}.noname.{self._joins}.{number}"
            cache = self._caches.get(members)
            if cache is None:
                cache = self._caches[members] = ResponseCache(members)
            cache.submit(pending)
            self._fresh.add(members)
            self._undecided += 1
        if timeline.on:
            timeline.begin(pending.row(), f"NEGOTIATE_{pending.kind.upper()}")
        if not soon:
            self._nudge()

    def listen(self, listener: Callable[[Request], None]) -> None:
        """Register a listener for notifications.

        From then on, notifications are received even while no thread of the script waits.

        Args:
            listener: called with each notification, including earlier ones, in the coordinator's order. It must neither
                block nor raise; it may submit collectives. It replaces the previous listener.

        Raises:
            CollectiveFailed: the world has ended.
        """
        with self._lock:
            if self._failure:
                raise self._failure.again()
            if self._listener is None:
                self._undecided += 1  # From now on the engine's own thread receives decisions.
            self._listener = listener
        self._deliver()
        self._nudge()

    def _deliver(self) -> None:
        # held while the listener runs, so that notifications arrive in the coordinator's order
        with self._delivering:
            while True:
                with self._lock:
                    listener = self._listener
                    if listener is None or not self._undelivered:
                        return
                    notification = self._undelivered.pop(0)
                listener(notification)

    def _nudge(self) -> None:
        if self._nudged:
            return
        self._nudged = True
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="elastic-engine", daemon=True
                    )
                    self._thread.start()
        self._wake.put(None)
        line = self._line
        if line is not None and self._driving.locked():
            # Wake the thread that receives decisions, because it may be waiting for other ranks.
            line.wake()

    def reach(self) -> None:
        """Connect to rank 0 before the first submission. This method blocks.

        A connection error is raised by the first collective.
        """
        with contextlib.suppress(CollectiveFailed), self._driving:
            if self._line is None and not (self._failure or self._resting):
                self._connect()
        self._notify()

    def leave(self) -> None:
        """Notify the other ranks that this rank is leaving, in ``shutdown()`` or at process exit."""
        if self._failure or self._left:
            return
        self._left = True
        # The message is lost if rank 0 has exited, or if another thread is connecting at this time.
        with contextlib.suppress(CollectiveFailed):
            if self._line is None and self._driving.acquire(blocking=False):
                try:
                    self._connect(LEAVE_S)
                finally:
                    self._driving.release()
            if self._line is not None:
                with self._sending:
                    self._line.send(RequestList(ALL, 0, requests=(Request(LEAVE, LEAVE),)))

    # ---- message exchange ------------------------------------------------------------------------------------------

    def complete(self, pending: Pending) -> None:
        """Wait until the coordinator has decided on the collective.

        Raises CollectiveFailed if a rank of the world was lost.
        """
        self.drive(lambda: pending.decided, time.monotonic() + BLOCKED_S)
        if not pending.decided:
            self._log_wait(pending)
            self.drive(lambda: pending.decided)

    def _log_wait(self, pending: Pending) -> None:
        here, line = threading.get_ident(), self._line
        if line is None or pending.kind == JOIN or self._submitters != {here}:
            return
        wait = Request(WAIT, pending.name, payload=script_line.of_thread(here))
        try:
            self._send_fresh()
            with self._sending:
                line.send(RequestList(pending.members, 0, requests=(wait,)))
        except CollectiveFailed as error:
            raise self.fail(error) from error

    def offer(self) -> None:
        """Send queued requests, and make the thread that drives the engine recheck its exit condition."""
        self._send_fresh()
        line = self._line
        if line is not None and self._driving.locked():
            line.wake()
        self._notify()

    def drain(self, pending: Pending) -> None:
        """Wait briefly, after the world has ended, for a decision that the driving thread has yet to carry out."""
        until = time.monotonic() + DRAIN_S
        while not pending.decided and self._driving.locked() and time.monotonic() < until:
            time.sleep(0.0005)

    def drive(self, done: Callable[[], bool], until: float | None = None) -> None:
        """Drive the engine in this thread: exchange messages and start collectives until ``done()`` returns True.

        Args:
            until: time of `time.monotonic` in seconds at which to return even if ``done()`` is False. None means no
                limit.

        Raises:
            CollectiveFailed: the engine has failed, now or in an earlier call.
        """

        def over() -> bool:
            return done() or (until is not None and time.monotonic() >= until)

        while not over():
            if self._failure:
                raise self._failure.again()
            if self._driving.acquire(blocking=False):
                try:
                    while not over():
                        self._turn(until)
                except CollectiveFailed as error:
                    self.fail(error)
                    raise
                # BaseException, because KeyboardInterrupt and signal handlers can interrupt the turn
                except BaseException as error:
                    if self._midway:
                        self._give_up(f"interrupted by {type(error).__name__}")
                    raise
                finally:
                    self._driving.release()
                    self._notify()
            else:
                self._send_fresh()
                with self._changed:
                    if not over() and self._driving.locked():
                        self._changed.wait(_left_of(until, _SLICE_S))

    def _work(self) -> None:
        core = self._env.core(self._place.local_rank)
        if core is not None:
            os.sched_setaffinity(threading.get_native_id(), {core})
        while True:
            self._wake.get()
            if self._failure:
                return
            self._wait_to_grow()
            with self._driving:
                try:
                    while self._undecided and not (self._failure or self._resting):
                        if not self._turn():
                            self._wait_to_grow()
                except CollectiveFailed as error:
                    self._give_up(str(error))
                    return
                except Exception as error:
                    self._give_up(f"{type(error).__name__}: {error}")
                    raise

    def _wait_to_grow(self) -> None:
        if self._env.cycle_s > 0:
            before = -1
            for _ in range(_MOST_CYCLES):
                now = self._undecided
                if now == before:
                    break
                before = now
                time.sleep(self._env.cycle_s)
        self._nudged = False
        if timeline.on:
            timeline.cycle()

    def _turn(self, until: float | None = None) -> bool:
        line = self._line
        if line is None:
            line = self._connect()
        self._nudged = False
        self._midway = True
        self._send_fresh()
        self._midway = False
        decisions = line.receive(_left_of(until))
        self._midway = True
        with self._carrying:
            if self._resting:
                return False
            for decision in decisions:
                self._carry_out(decision)
        self._midway = False
        if decisions:
            self._notify()
        return bool(decisions)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _send_fresh(self) -> None:
        line = self._line
        if line is None:
            return  # The connecting thread will send all queued requests.
        with self._sending:
            with self._lock:
                made = [self._caches[members].offer() for members in self._fresh]
                self._fresh.clear()
            for offer in made:
                if offer is not None:
                    line.send(offer)

    def _connect(self, timeout_s: float | None = None) -> ControllerClient | LocalController:
        place, secret = self._place, self._env.secret
        if place.rank == 0:
            return self._local_controller()
        rules = fetch_rules(self._store, place.rank, timeout_s)
        self._limits = rules.limits
        line = ControllerClient(rules, place.rank, self.generation, secret, silence_s(self._env))
        self._line = line
        if self._failure:  # The engine was aborted while this thread was connecting.
            line.abort()
        return line

    def _local_controller(self) -> LocalController:
        with self._lock:
            if not isinstance(self._line, LocalController):
                listener = listen(self._env.bind_host)
                rules = rules_of(listener, self._limits)
                self._line = LocalController(
                    rules, listener, self._place.size, self.generation, self._env, self._give_up
                )
                if self._failure:
                    self._line.abort()
            return self._line

    def rules(self) -> list[bytes]:
        """Return the settings that rank 0 publishes for connecting ranks. Thread-safe.

        Rank 0 need not have submitted anything.
        """
        return [encode_rules(self._local_controller().rules)]

    # ---- execution of decisions ------------------------------------------------------------------------------------

    def _carry_out(self, decision: ResponseList) -> None:
        with self._lock:
            cache = self._caches.get(decision.members)
            if cache is None:
                cache = self._caches[decision.members] = ResponseCache(decision.members)
            found = list(cache.take(decision))
            if decision.last_joined >= 0:
                # A joined rank has made fewer calls than the others, so all ranks restart the numbering of unnamed
                # collectives.
                self._joins += 1
                self._unnamed.clear()
                joined = cache.in_flight.pop(JOIN, None)
                if joined is not None:
                    joined.settled(decision.last_joined)
                    self._undecided -= 1
            self._undelivered += [
                r.request for r, _ in found if r.request.kind == NOTIFY and not r.error
            ]
            if decision.joined == self._place.rank and JOIN in cache.in_flight:
                cache.in_flight[JOIN].noted = True
        self._deliver()
        for indices in fusion.batches([response for response, _ in found], self._limits):
            batch = [found[index] for index in indices]
            asked = [pending for _, pending in batch if pending is not None]
            try:
                start(decision.members, batch, self._group_for)
            except BaseException as error:
                for pending in asked:
                    pending.settled(error=error)
                if isinstance(error, CollectiveFailed) or not isinstance(error, Exception):
                    raise
                # The other ranks have started the collective and wait for this one, so the world can't continue.
                raise CollectiveFailed(
                    f"{asked[0].name if asked else 'a collective'} could not be started on this rank: {error}. See"
                    " the traceback of this rank"
                ) from error
            finally:
                with self._lock:
                    self._undecided -= len(asked)

    # ---- abort and close -------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        """Report that the world has failed, and make all waits raise an error.

        This method is called in the engine's own threads, where an exception would reach no caller.
        """
        self.fail(reason)
        if not self._resting:
            self._broken(reason)

    def fail(self, reason: str | CollectiveFailed) -> CollectiveFailed:
        """Make current and future waits raise CollectiveFailed, and return that error.

        Only the first call has an effect. Do not call this method in the link thread.
        """
        failure = CollectiveFailed(reason) if isinstance(reason, str) else reason.again()
        self._failure = self._failure or failure
        self._wake.put(None)
        self._notify()
        return self._failure.again()

    def abort(self) -> None:
        """Make current and future waits raise CollectiveFailed, without blocking.

        This method may be called from any thread. It wakes the thread that drives the engine, which wakes the other
        threads.
        """
        self._failure = self._failure or CollectiveFailed("aborted", aborted=True)
        self._wake.put(None)
        if self._line is not None:
            self._line.abort()

    def rest(self, timeout_s: float) -> bool:
        """Stop executing decisions at process exit, without reporting a failure of the world.

        This method waits up to ``timeout_s`` seconds for the decision in progress, and returns whether it has
        completed.
        """
        self._resting = True
        if not self._carrying.acquire(timeout=timeout_s):
            return False
        self._carrying.release()
        return True

    def close(self) -> None:
        """Close sockets and stop threads. Call `abort` first."""
        self.abort()
        self._notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        if self._line is not None:
            self._line.close()
        # The engine is part of a reference cycle, so release its tensors and groups now instead of at the next garbage
        # collection.
        with self._lock:
            for cache in self._caches.values():
                cache.drop()
            self._listener = None

    def close_in_forked_child(self) -> None:
        """Close the sockets that a forked child has inherited. This method is called in the child."""
        if self._line is not None:
            self._line.close_sockets()


def _left_of(until: float | None, most_s: float | None = None) -> float | None:
    """Return the seconds until the deadline, limited to ``most_s``, or None for no limit."""
    if until is None:
        return most_s
    left_s = max(0.0, until - time.monotonic())
    return left_s if most_s is None else min(left_s, most_s)
