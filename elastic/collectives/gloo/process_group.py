"""Collectives over Gloo: implements the interface with ``ProcessGroupGloo`` and adds an abort, which Gloo lacks.

All connections are made eagerly. Time from the start of connecting to the end of the first allreduce on 2 cores, in ms
(p50):

    ranks   eager   lazy
      2       3       5
      4       5       5
      8      25      23
     16      77      56

Lazy connections would not speed up recovery, and the first use of any connection could hang: a listening rank ignores
its timeout if its peer exits before it connects (gloo issue 520).

Gloo connects in a separate thread, because a rank that waits for a connection has no socket yet that could be closed.
`abort` abandons that thread, which ends at the timeout. Once the group is connected, `abort` closes its sockets, which
ends all operations.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives import dtypes_and_ops, threads_at_exit
from elastic.collectives.gloo import call_header, sockets, thread_activity
from elastic.collectives.gloo.call_header import CollectiveKind, FirstExchange, Header, Places
from elastic.collectives.gloo.point_to_point import GlooMessages, ReceivedMessage, SentMessage
from elastic.collectives.gloo.sockets import Endpoint
from elastic.collectives.interface import Op, Work
from elastic.collectives.torch_group import REDUCE, as_bytes
from elastic.errors import CollectiveFailed, Differing, TensorMismatch
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import Call, Store

_THREADS = 2  # number of collectives of one group that can progress at the same time
_DRAIN_STEP_S = 0.0005
_QUIET_S = 0.02  # A group counts as drained after this many seconds without activity.
_CLOSE_S = 0.1  # time in seconds in which work in flight usually ends after the sockets are closed
# A waiting thread checks this often whether the group was aborted, because Gloo occasionally (in 1 of 80 aborts) loses
# the wake-up of a queued send. The check does not slow an allreduce, and a waiting rank uses 1 % of a core for it.
_SLICE = timedelta(milliseconds=20)
_LOOK_EVERY = 50  # number of slices between two checks for closed connections
_AT_ONCE = timedelta(milliseconds=1)
_AT_ONCE_S = _AT_ONCE.total_seconds()

# data that a rank publishes: its listener, Gloo's key and value, and data of the caller
_decoder: msgspec.msgpack.Decoder[tuple[Endpoint, str, bytes, bytes]] = msgspec.msgpack.Decoder(
    tuple[Endpoint, str, bytes, bytes]
)


worker_settings.record_nothing()


class GlooCollectives:
    """Gloo group of one generation, for CPU tensors. Call `connect` first. Any thread may call `abort` at any time.

    Args:
        agreed: whether the ranks agree on every call in advance, so that large calls need no first exchange.
    """

    scales_inside = False

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        collective_timeout_s: float | None = None,
        *,
        agreed: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s  # timeout for connecting, in seconds
        self._collective_timeout_s = (
            timeout_s if collective_timeout_s is None else collective_timeout_s
        )
        self._backend: Any = None
        self._own: Endpoint | None = None
        self._peers: frozenset[Endpoint] = frozenset()
        # inodes of the group's sockets, once it is connected
        self._sockets: frozenset[int] | None = None
        self._failed: str | None = None
        self._aborted = False  # whether `_failed` is due to an abort
        # description of the differing calls, if `_failed` is due to them
        self._differs: Differing | None = None
        self._late = False  # whether `_failed` is due to a late rank
        # description of the mismatch, if `_failed` is due to one
        self._mismatch: TensorMismatch | None = None
        self._messages = GlooMessages(self)
        self._key = ""  # identifies the group on all of its ranks
        # set when the creation of the group has succeeded or failed
        self._built = threading.Event()
        self._swapping = Call()
        self._payload = b""
        self._on_payloads: Callable[[list[bytes]], None] = lambda payloads: None
        self._under_way: collections.deque[Any] = collections.deque()
        self._agreed = agreed
        self._first_exchange = FirstExchange(rank, size)
        self._beginning = threading.Lock()
        # Works whose exchanges have not all begun. Only the first of them can be in its first exchange.
        self._queue: collections.deque[GlooWork] = collections.deque()
        self._following = False  # whether a background thread is starting the queued exchanges

    # ---- connection ------------------------------------------------------------------------------------------------

    def connect(
        self,
        store: Store,
        purpose: str,
        bind_host: str,
        *,
        payload: bytes = b"",
        on_payloads: Callable[[list[bytes]], None] = lambda payloads: None,
    ) -> None:
        """Block until this rank is connected to every other rank.

        Args:
            store: store through which the ranks exchange addresses.
            purpose: key in the store, equal on all ranks.
            bind_host: address on which this rank listens.
            payload: caller's data to publish with this rank's address.
            on_payloads: called in another thread with the data of all ranks, by rank, before any connection is made. If
                it raises, no connection is made.

        Raises:
            CollectiveFailed: a rank is late or lost, or `abort` was called.
        """
        self._payload, self._on_payloads, self._key = payload, on_payloads, purpose
        threads_at_exit.begin("elastic-gloo", self._build, store, purpose, bind_host)
        # The exchange and the connections have separate deadlines. This deadline covers the remaining steps.
        longest_s = self._collective_timeout_s + self._timeout_s + 1.0
        if not self._built.wait(longest_s):
            self._fail(f"Gloo did not connect {self.size} ranks within {longest_s:g} s")
        self._raise_if_failed()

    def _build(self, store: Store, purpose: str, bind_host: str) -> None:
        try:
            self._backend = self._make(store, purpose, bind_host)
        except Exception as error:  # Pass every error to the waiting thread, which raises it.
            self._fail(_short(error))
        finally:
            self._built.set()
        if self._failed is not None:
            # Shut the connections down: `abort` was called during the attempt, possibly before any socket existed.
            sockets.cut(self._own, self._peers, self._sockets)

    def _make(self, store: Store, purpose: str, bind_host: str) -> Any:
        """Create Gloo's group. This is a separate function, so that all temporaries are freed when it returns."""
        gloo: Any = c10d.ProcessGroupGloo  # torch's stubs lack these options
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=bind_host, lazy_init=False)]
        options._threads = _THREADS
        options._timeout = timedelta(seconds=self._timeout_s)

        def swap(key: str, value: bytes) -> dict[str, bytes]:
            return self._swap(store, purpose, key, value)

        backend = gloo(_Addresses(swap), self.rank, self.size, options)
        if self._collective_timeout_s != self._timeout_s:
            backend._set_default_timeout(timedelta(seconds=self._collective_timeout_s))
        sockets.keep_from_programs(self._own, self._peers)
        self._sockets = sockets.identities(self._own, self._peers)
        return backend

    def _swap(self, store: Store, purpose: str, key: str, value: bytes) -> dict[str, bytes]:
        """Exchange the values of all ranks under one of Gloo's keys, including their listeners' addresses.

        The wait has the timeout of a collective, because other ranks may arrive late at their first collective.
        """
        own = sockets.find_listener(value)
        if own is None:
            raise CollectiveFailed(
                "Gloo opened no listening socket for this group, so a blocked collective could not be interrupted:"
                " check that no other library replaces torch's Gloo"
            )
        self._own = own
        self._raise_if_failed()
        mine = msgspec.msgpack.encode((own, key, value, self._payload))
        published = store.exchange(
            f"{purpose}/{self.size}",
            self.rank,
            self.size,
            mine,
            self._collective_timeout_s,
            self._swapping,
        )
        rows = [_decoder.decode(blob) for blob in published]
        self._on_payloads([row[3] for row in rows])
        self._peers = frozenset(row[0] for row in rows) - {own}
        self._raise_if_failed()
        return {row[1]: row[2] for row in rows}

    # ---- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        dtypes_and_ops.check(tensor, op)
        carried, then = dtypes_and_ops.carried(tensor, op, scale, divisor)
        dtype = dtypes_and_ops.DTYPES[tensor.dtype]
        called = call_header.header(CollectiveKind.ALLREDUCE, carried.nbytes, dtype=dtype, op=op)
        if not self._first_exchange.fits(carried.nbytes):
            options = c10d.AllreduceOptions()
            options.reduceOp = REDUCE[op]  # type: ignore[assignment]
            second = ("allreduce", [carried], options)
            return self._call(called, second=second, then=then)
        # Each rank sends its tensor to every other rank and sums locally. This takes one message delay; Gloo's ring
        # takes two per rank.
        flat = carried.detach().reshape(-1)

        def reduce(parts: list[torch.Tensor]) -> None:
            carried.detach().copy_(dtypes_and_ops.total(parts, op).view(carried.shape))
            if then is not None:
                then()

        return self._call(called, flat, put=reduce)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        flat = as_bytes(tensor)
        called = call_header.header(CollectiveKind.BROADCAST, flat.numel(), root=root)
        if not self._first_exchange.fits(flat.numel()):
            options = c10d.BroadcastOptions()
            options.rootRank = root
            options.rootTensor = 0
            return self._call(called, second=("broadcast", [flat], options))
        if root == self.rank:
            return self._call(called, flat)
        return self._call(called, own=flat, put=lambda parts: flat.copy_(parts[root]))

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        flat = as_bytes(tensor)
        called = call_header.header(CollectiveKind.ALLGATHER, flat.numel())
        places = [as_bytes(each) for each in outputs]
        if not self._first_exchange.fits(flat.numel()):
            return self._call(called, second=("allgather", [places], [flat]))

        def gather(parts: list[torch.Tensor]) -> None:
            for place, part in zip(places, parts, strict=True):
                place.copy_(part)

        return self._call(called, flat, put=gather)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        called = call_header.header(CollectiveKind.ALLTOALL, row)
        nbytes = [rows * row for rows in received], [rows * row for rows in sent]
        return self._call(
            called,
            call_header.splits(sent, received),
            compare=call_header.splits_agree,
            second=("alltoall_base", as_bytes(output), as_bytes(tensor), *nbytes),
        )

    def barrier(self) -> Work:
        return self._call(call_header.header(CollectiveKind.BARRIER))

    # ---- point-to-point messages, unordered relative to collectives --------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> SentMessage:
        """Send a contiguous tensor. Messages to one rank with one tag arrive in order. See `Messenger.send`."""
        return self._messages.send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ReceivedMessage:
        """Start receiving into a contiguous tensor.

        With ``source`` None, the message may come from any rank. See `Messenger.receive`.
        """
        return self._messages.receive(tensor, source, tag)

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Block until rank 0 has received a message from each other rank.

        After a failure, the group can send no more messages.

        Raises:
            CollectiveFailed: a rank did not arrive. On rank 0, the error names the first missing rank, or all missing
                ranks with ``wait_all_ranks``.
        """
        self._raise_if_failed()
        try:
            self._backend.monitored_barrier(timedelta(seconds=timeout_s), wait_all_ranks)
        except RuntimeError as error:
            self._fail(_short(error))
            raise CollectiveFailed(self._failed, aborted=self._aborted) from None

    def _call(
        self,
        called: Header,
        payload: torch.Tensor | None = None,
        *,
        own: torch.Tensor | None = None,
        put: Callable[[list[torch.Tensor]], object] | None = None,
        compare: Callable[[list[torch.Tensor]], bool] | None = None,
        second: tuple[Any, ...] | None = None,
        then: Callable[[], object] | None = None,
    ) -> GlooWork:
        """Begin a collective with its first exchange.

        Args:
            called: header of the call.
            payload: tensor that is sent with the header.
            own: this rank's entry in the payloads passed to ``put``; by default ``payload``.
            put: called with every rank's payload.
            compare: function that returns whether the payloads show that all ranks made the same call.
            second: the method of Gloo's group for a second exchange, and its arguments.
            then: called at the end, to put the result in place.
        """
        self._raise_if_failed()
        own = payload if own is None else own
        work = GlooWork(self, called, payload, own, put, compare, second, then)
        with self._beginning:
            self._queue.append(work)
            self._begin_next()
            if self._queue and not self._following:
                self._following = True
                threads_at_exit.begin("elastic-gloo-second", self._follow)
        return work

    def _follow(self) -> None:
        """Start second exchanges in the background.

        Otherwise other ranks would have to wait until the script of this rank waits for the work.
        """
        try:
            while True:
                with self._beginning:
                    self._begin_next()
                    if not self._queue or self._failed is not None:
                        self._following = False
                        return
                    first = self._queue[0].first
                # The error means that the time slice has ended or the exchange has failed. `_begin_next` detects a
                # failure.
                with contextlib.suppress(RuntimeError):
                    first.wait(_SLICE)
                threads_at_exit.leave_if_ending()
        except (CollectiveFailed, threads_at_exit.ProcessExiting):
            return

    def _begin_next(self) -> None:
        """Begin all exchanges that can begin, in the order of the calls.

        Gloo numbers the exchanges, and the numbers must match on all ranks. Therefore a second exchange is always
        numbered directly after its first exchange, regardless of when the first exchange completes on this rank.
        """
        while self._queue and self._failed is None:
            work = self._queue[0]
            alone = self._agreed and work.two
            if work.first is None and not alone:
                payload = None if work.payload is None else as_bytes(work.payload)
                places, *arguments = self._first_exchange.begin(work.called, payload)
                work.places = places
                work.first = self.begin("alltoall_base", places.flat, *arguments)
                _watch(self._under_way, work.first)
            if work.second is not None:
                if not alone and not (work.first.is_completed() and self._same_called(work)):
                    return
                work.rest = self.begin(*work.second)
                _watch(self._under_way, work.rest)
            self._queue.popleft()

    def _same_called(self, work: GlooWork) -> bool:
        """Return whether all ranks made the same call, after the first exchange. If not, fail the group."""
        try:
            work.first.wait()
        except RuntimeError as error:
            self._late = self.failure(_short(error)).late
            self._fail(_short(error))
            return False
        assert work.places is not None
        same = work.places.agree(work.called)
        if same and work.compare is not None and work.own is not None:
            same = work.compare(work.places.payloads(work.own))
        if not same:
            # The group's connections remain open until `abort`, because other ranks may not have read this rank's call
            # yet.
            if self._failed is None:
                self._differs = Differing(self._key, self.rank, self.size)
                self._failed = "the ranks of this group called different collectives, or passed different sizes"
            return False
        return True

    def awaited(self, work: GlooWork) -> Any:
        """Return the Gloo work that must complete before ``work`` can continue, or None if ``work`` is complete.

        Raises:
            CollectiveFailed: the group has failed.
        """
        if work.over:
            return None
        if self._failed is None:
            with self._beginning:
                self._begin_next()
                if not work.begun() and self._failed is None:
                    # Return the first exchange of this work, or of an earlier work that must progress first.
                    return self._queue[0].first
        if not work.begun():
            self._raise_if_failed()
        last = work.rest if work.two else work.first
        return None if last.is_completed() else last

    def conclude(self, work: GlooWork) -> None:
        """Put the result of a completed work in place.

        Raises:
            CollectiveFailed: the group has failed.
        """
        if work.two:
            self.wait_for(work.rest)
        else:
            if not self._same_called(work):
                self._raise_if_failed()
            assert work.places is not None
            if work.put is not None and work.own is not None:
                work.put(work.places.payloads(work.own))
        if work.places is not None:
            self._first_exchange.give_back(work.places)
            work.places = None

    def begin(self, name: str, *arguments: Any) -> Any:
        self._raise_if_failed()
        try:
            return getattr(self._backend, name)(*arguments)
        except RuntimeError as error:
            self._fail(_short(error))
            raise CollectiveFailed(self._failed, aborted=self._aborted) from None

    # ---- abort and close -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._fail("aborted", aborted=True)

    def drain(self, timeout_s: float) -> bool:
        """Wait, after `abort`, until no collective of this group writes to any tensor. See `Collectives.drain`."""
        now = time.monotonic()
        deadline, look_at = now + timeout_s, now + _QUIET_S
        # Wait for a thread that is still starting exchanges; this wait counts toward the timeout.
        if self._beginning.acquire(timeout=timeout_s):
            self._beginning.release()
        before: thread_activity.Runs | None = None
        while any(not work.is_completed() for work in list(self._under_way)):
            now = time.monotonic()
            if now >= look_at:
                # A work that lost its wake-up never completes. Once all received data is read after closing the
                # sockets, and the computing threads remain asleep, no thread will write to a tensor any more.
                self.abort()
                # This runs in a separate thread, because Gloo may never return if its sockets are closed in the middle
                # of an operation.
                closing = threading.Thread(target=self._time_out, daemon=True)
                closing.start()
                closing.join(max(0.0, deadline - now))
                if closing.is_alive():
                    return self._connections() == 0
                unread = sockets.unread(self._own, self._peers, self._sockets)
                runs = thread_activity.runs() if unread == 0 else None
                if runs is not None and runs == before:
                    return True
                before, look_at = runs, now + _QUIET_S
            if now > deadline:
                return self._connections() == 0
            time.sleep(_DRAIN_STEP_S)
        return True

    def close(self) -> None:
        """Free sockets and threads within about 0.1 s. See `Collectives.close`."""
        self.abort()
        self.drain(_CLOSE_S)
        backend, self._backend = self._backend, None
        works = list(self._under_way)
        self._under_way.clear()
        for left in [each for each in _left if each.done()]:
            _left.remove(left)
            left.release()
        if any(not work.is_completed() for work in works):
            _left.append(_Left(backend, works))

    def close_in_forked_child(self) -> None:
        """Release the sockets in a forked child, so that the parent's exit closes them."""
        self._failed = (
            "process groups can't be used in a forked child: run collectives in the worker itself"
        )
        sockets.release_in_child(self._own, self._peers, self._sockets)

    def _fail(self, reason: str, *, aborted: bool = False) -> None:
        # The first rank to detect a failure closes its own sockets too; otherwise its peers would wait for the timeout.
        if self._failed is None:
            self._aborted = aborted
            self._failed = reason
        sockets.cut(self._own, self._peers, self._sockets)
        self._swapping.abort()
        self._built.set()

    def look(self) -> None:
        """Fail the group if a connection was closed.

        Gloo may detect a closed connection without waking a waiting thread.
        """
        if self._connections() < self.size - 1:
            self._fail("the connection to a peer was closed")

    def _time_out(self) -> None:
        """Make Gloo close the connections left open after an abort, and wake the threads that wait for them.

        A send or receive that fails in the middle of a message leaves its connection open. The connection is not used
        again, but a thread spins at the end of its stream, and other works wait until the timeout. The timeout of one
        receive closes all connections of a group. This takes at least a millisecond, so do not call it in the link
        thread.
        """
        backend, nothing = self._backend, torch.zeros(1, dtype=torch.uint8, device="cpu")
        if backend is None or self._connections() == 0:
            return
        for peer in range(self.size):
            if peer != self.rank:
                # The receive has timed out, or its connection is already closed.
                with contextlib.suppress(RuntimeError):
                    backend.recv([nothing], peer, 0).wait(_AT_ONCE)

    def _connections(self) -> int:
        return sockets.count(self._own, self._peers, self._sockets)

    def wait_for(self, work: Any) -> None:
        """Wait for one of Gloo's works, with the timeout of a collective.

        Raises:
            CollectiveFailed: the group has failed.
        """
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(_short(error))
            raise self.failure(_short(error)) from None

    def failure(self, error: str) -> CollectiveFailed:
        """Return the error of a failed collective.

        The error contains the first cause that this rank detected, and Gloo's message.
        """
        message = error if self._failed in (None, error) else f"{self._failed}: {error}"
        # Only the text of Gloo's error distinguishes a timeout.
        late = "Timed out" in error and not self._aborted
        return CollectiveFailed(message, aborted=self._aborted, late=late)

    def mismatched(self, error: TensorMismatch) -> None:
        """Make all later calls of the group fail with this error.

        The connections remain open until `abort`. Otherwise another rank would fail with a closed connection instead of
        this error.
        """
        self._mismatch = self._mismatch or error
        self._failed = self._failed or str(error)

    def _raise_if_failed(self) -> None:
        if self._mismatch is not None:
            raise self._mismatch.again()
        if self._failed is not None:
            raise CollectiveFailed(
                self._failed, aborted=self._aborted, differs=self._differs, late=self._late
            )


def _watch(under_way: collections.deque[Any], work: Any) -> None:
    while under_way and under_way[0].is_completed():
        under_way.popleft()
    under_way.append(work)


class _Left:
    """Aborted group that cannot be freed before its timeout.

    Freeing the group earlier would block on a work that lost its wake-up.

    An additional reference keeps the group alive at interpreter exit, because a thread that is terminated while it
    frees a group would abort the process.
    """

    def __init__(self, backend: Any, works: list[Any]) -> None:
        self._held: list[Any] | None = [backend, works]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))

    def done(self) -> bool:
        return self._held is not None and all(work.is_completed() for work in self._held[1])

    def release(self) -> None:
        held, self._held = self._held, None
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))


_left: list[_Left] = []  # groups to free when another group is closed


class GlooWork:
    """A collective in flight in a Gloo group."""

    def __init__(
        self,
        group: GlooCollectives,
        called: Header,
        payload: torch.Tensor | None,
        own: torch.Tensor | None,
        put: Callable[[list[torch.Tensor]], object] | None,
        compare: Callable[[list[torch.Tensor]], bool] | None,
        second: tuple[Any, ...] | None,
        then: Callable[[], object] | None,
    ) -> None:
        self.called = called
        self.payload = payload
        self.own = own
        self.put = put
        self.compare = compare
        self.second = second
        self.then = then
        self.two = second is not None  # whether the work needs a second exchange
        self.first: Any = None  # torch's `Work` of the first exchange
        self.places: Places | None = None
        self.rest: Any = None  # torch's `Work` of the second exchange, if any
        self.over = False
        self._group = group
        # lock that makes waiters return only once the result is in place
        self._concluding = threading.Lock()

    def begun(self) -> bool:
        """Return whether all exchanges of the work have begun."""
        return (self.rest if self.two else self.first) is not None

    def done(self) -> bool:
        try:
            return self._group.awaited(self) is None
        except CollectiveFailed:
            return True

    def within(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self._slice(timedelta(seconds=max(until - time.monotonic(), _AT_ONCE_S))):
            self._group._raise_if_failed()
            if time.monotonic() >= until:
                return False
        self._conclude()
        return True

    def wait(self) -> None:
        for turn in itertools.count(1):
            if self._slice(_SLICE):
                break
            if turn % _LOOK_EVERY == 0:
                self._group.look()
            self._group._raise_if_failed()
        self._conclude()

    def _slice(self, timeout: timedelta) -> bool:
        awaited = self._group.awaited(self)
        if awaited is not None:
            try:
                awaited.wait(timeout)
            # The error means that the time slice has ended or the exchange has failed. `conclude` detects a failure.
            except RuntimeError:
                return False
            awaited = self._group.awaited(self)
        return awaited is None

    def _conclude(self) -> None:
        with self._concluding:
            if not self.over:
                self._group.conclude(self)
                if self.then is not None:
                    self.then()
                self.over = True
                # The caller may keep this object, so its tensors are released.
                self.payload = self.own = self.put = self.compare = self.second = self.then = None


class _Addresses(c10d.Store):
    """Store that is passed to Gloo.

    It exchanges each published value with all ranks once, then reads from memory.
    """

    def __init__(self, swap: Callable[[str, bytes], dict[str, bytes]]) -> None:
        super().__init__()
        self._swap = swap
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._known.update(self._swap(key, data))

    def get(self, key: str) -> bytes:
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = [key for key in keys if key not in self._known]
        if missing:
            raise RuntimeError(
                f"Gloo is waiting for the key {missing}, but no rank has published this key: check that all ranks"
                " called the same collective"
            )


def _short(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    first = re.sub(r"^\[(enforce fail at )?[^]]*\.(cc|h|cpp):\d+\]\s*", "", first)
    return first.partition(". This is typically")[0].strip() or type(error).__name__
