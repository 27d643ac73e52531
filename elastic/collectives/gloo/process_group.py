"""Collectives over Gloo: the seam on ``ProcessGroupGloo``, with the abort that Gloo lacks.

Always connected eagerly. Measured on 2 cores, from nothing to the end of the first allreduce, in ms (p50):

    ranks   eager   lazy
      2       3       5
      4       5       5
      8      25      23
     16      77      56

Lazily, nothing is gained where recovery has to be fast, and every first use of a pair could hang: a listener ignores
its timeout if its peer dies before that (gloo issue 520).

Gloo connects in a thread of its own, because the rank that waits to be connected to has no socket yet that could be
cut. On `abort` that thread is left behind; it ends by itself, at the timeout at the latest. Everything after that ends
by cutting the group's sockets.
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

from elastic.collectives import dtypes_and_ops, threads
from elastic.collectives.gloo import first_exchange, sockets, thread_activity
from elastic.collectives.gloo.first_exchange import CollectiveKind, FirstExchange, Header, Places
from elastic.collectives.gloo.messages import GlooMessages, ReceivedMessage, SentMessage
from elastic.collectives.gloo.sockets import Endpoint
from elastic.collectives.interface import Op, Work
from elastic.collectives.torch_group import REDUCE, as_bytes
from elastic.errors import CollectiveFailed, Differing, TensorMismatch
from elastic.rendezvous import environment
from elastic.rendezvous.store import Call, Store

_THREADS = 2  # collectives of one group that make progress at the same time
_DRAIN_STEP_S = 0.0005
_QUIET_S = 0.02  # how long nothing may have happened in a group that is taken for drained
_CLOSE_S = 0.1  # in which what is under way usually ends once the sockets are cut
# How often who waits looks whether the group was aborted. Needed because Gloo now and then (in 1 of 80 aborts in the
# middle of an allreduce) loses the wake-up of a send that is queued while its socket closes, and then waits for the
# whole timeout. An allreduce takes no longer for it; a rank that waits for a late one uses 1 % of a core.
_SLICE = timedelta(milliseconds=20)
_LOOK_EVERY = 50  # slices
_AT_ONCE = timedelta(milliseconds=1)
_AT_ONCE_S = _AT_ONCE.total_seconds()

# What a rank publishes: its listener, what Gloo stored under which key, and its word.
_decoder: msgspec.msgpack.Decoder[tuple[Endpoint, str, bytes, bytes]] = msgspec.msgpack.Decoder(
    tuple[Endpoint, str, bytes, bytes]
)


environment.record_nothing()


class GlooCollectives:
    """One group of one generation, on CPU tensors. `connect` first; `abort` works at any time, from any thread.

    ``agreed``: its ranks have agreed on every call before they make it, and large ones need no first exchange.
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
        self._timeout_s = timeout_s  # to connect
        self._collective_timeout_s = (
            timeout_s if collective_timeout_s is None else collective_timeout_s
        )
        self._backend: Any = None
        self._own: Endpoint | None = None
        self._peers: frozenset[Endpoint] = frozenset()
        self._sockets: frozenset[int] | None = None  # inodes, once connected
        self._failed: str | None = None
        self._aborted = False  # that is why
        self._differs: Differing | None = None  # that is why
        self._late = False  # that is why
        self._mismatch: TensorMismatch | None = None  # that is why
        self._messages = GlooMessages(self)
        self._key = ""  # names the group to all of its ranks
        self._built = threading.Event()  # or given up
        self._swapping = Call()
        self._word = b""
        self._heard: Callable[[list[bytes]], None] = lambda words: None
        self._under_way: collections.deque[Any] = collections.deque()
        self._agreed = agreed
        self._first_exchange = FirstExchange(rank, size)
        self._beginning = threading.Lock()
        # Those whose first exchange, or second, has not begun. Its first is the only one that may be in the first.
        self._queue: collections.deque[GlooWork] = collections.deque()
        self._following = False  # a thread begins what is left in it

    # ---- connecting ------------------------------------------------------------------------------------------------

    def connect(
        self,
        store: Store,
        purpose: str,
        bind_host: str,
        *,
        word: bytes = b"",
        heard: Callable[[list[bytes]], None] = lambda words: None,
    ) -> None:
        """Blocks until this rank is connected to every other. Raises CollectiveFailed, also on `abort`.

        ``word`` travels with this rank's address. ``heard`` is given every rank's, by rank, before anything is
        connected, in another thread; if it raises, nothing is.
        """
        self._word, self._heard, self._key = word, heard, purpose
        threads.begin("elastic-gloo", self._build, store, purpose, bind_host)
        # The exchange and the connections have a deadline each; this third one is for what has none.
        longest_s = self._collective_timeout_s + self._timeout_s + 1.0
        if not self._built.wait(longest_s):
            self._fail(f"Gloo did not connect {self.size} ranks within {longest_s:g} s")
        self._raise_if_failed()

    def _build(self, store: Store, purpose: str, bind_host: str) -> None:
        try:
            self._backend = self._make(store, purpose, bind_host)
        except Exception as error:  # whatever happens here must reach the thread that waits
            self._fail(_short(error))
        finally:
            self._built.set()
        if self._failed is not None:  # aborted meanwhile, perhaps before there was anything to cut
            sockets.cut(self._own, self._peers, self._sockets)

    def _make(self, store: Store, purpose: str, bind_host: str) -> Any:
        """Everything of torch's that is used on the way is freed when this returns."""
        gloo: Any = c10d.ProcessGroupGloo  # its stubs lack the options that it has
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
        """What Gloo publishes under one key, for what every rank published; learns all listeners' addresses.

        A rank that comes late to its first collective is no other than one that comes late to its hundredth: it is
        waited for as long.
        """
        own = sockets.find_listener(value)
        if own is None:
            raise CollectiveFailed("the listener of this group is not among the open sockets")
        self._own = own
        self._raise_if_failed()
        mine = msgspec.msgpack.encode((own, key, value, self._word))
        published = store.exchange(
            f"{purpose}/{self.size}",
            self.rank,
            self.size,
            mine,
            self._collective_timeout_s,
            self._swapping,
        )
        rows = [_decoder.decode(blob) for blob in published]
        self._heard([row[3] for row in rows])
        self._peers = frozenset(row[0] for row in rows) - {own}
        self._raise_if_failed()
        return {row[1]: row[2] for row in rows}

    # ---- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        dtypes_and_ops.check(tensor, op)
        carried, then = dtypes_and_ops.carried(tensor, op, scale, divisor)
        dtype = dtypes_and_ops.DTYPES[tensor.dtype]
        called = first_exchange.header(CollectiveKind.ALLREDUCE, carried.nbytes, dtype=dtype, op=op)
        if not self._first_exchange.fits(carried.nbytes):
            options = c10d.AllreduceOptions()
            options.reduceOp = REDUCE[op]  # type: ignore[assignment]
            second = ("allreduce", [carried], options)
            return self._call(called, second=second, then=then)
        # Every rank sends all to every other, and adds up by itself: one way there, where Gloo's ring takes twice as
        # many, one after another, as there are ranks.
        flat = carried.detach().reshape(-1)

        def reduce(parts: list[torch.Tensor]) -> None:
            carried.detach().copy_(dtypes_and_ops.total(parts, op).view(carried.shape))
            if then is not None:
                then()

        return self._call(called, flat, put=reduce)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        flat = as_bytes(tensor)
        called = first_exchange.header(CollectiveKind.BROADCAST, flat.numel(), root=root)
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
        called = first_exchange.header(CollectiveKind.ALLGATHER, flat.numel())
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
        called = first_exchange.header(CollectiveKind.ALLTOALL, row)
        nbytes = [rows * row for rows in received], [rows * row for rows in sent]
        return self._call(
            called,
            first_exchange.splits(sent, received),
            compare=first_exchange.splits_agree,
            second=("alltoall_base", as_bytes(output), as_bytes(tensor), *nbytes),
        )

    def barrier(self) -> Work:
        return self._call(first_exchange.header(CollectiveKind.BARRIER))

    # ---- messages from one rank to another, in no order with the collectives -----------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> SentMessage:
        """Contiguous; what is sent to one rank under one tag arrives in this order. See `Messenger.send`."""
        return self._messages.send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ReceivedMessage:
        """Into a contiguous tensor. None: from whichever rank's message comes first; see `Messenger.receive`."""
        return self._messages.receive(tensor, source, tag)

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Blocks. Rank 0 waits for each of the others. Raises CollectiveFailed, which there says who did not come: the
        first of them, or with ``wait_all_ranks`` all. No message can be sent after that.
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
        """A collective that begins with the first exchange. ``payload`` travels with it, and ``put`` is given every
        rank's, this one's being ``own``, by default the same; ``compare`` tells from them whether all ranks have called
        the same. ``second``: the method of Gloo's group that does the rest and its arguments; ``then`` puts what came
        of that in place.
        """
        self._raise_if_failed()
        own = payload if own is None else own
        work = GlooWork(self, called, payload, own, put, compare, second, then)
        with self._beginning:
            self._queue.append(work)
            self._begin_next()
            if self._queue and not self._following:
                self._following = True
                threads.begin("elastic-gloo-second", self._follow)
        return work

    def _follow(self) -> None:
        """Begins second exchanges while the script does not wait for them: it may first wait for another group, for a
        message, or compute, and other ranks would wait for this one meanwhile.
        """
        try:
            while True:
                with self._beginning:
                    self._begin_next()
                    if not self._queue or self._failed is not None:
                        self._following = False
                        return
                    first = self._queue[0].first
                # The slice is over; or it has failed, as `_begin_next` finds.
                with contextlib.suppress(RuntimeError):
                    first.wait(_SLICE)
                threads.leave_if_ending()
        except (CollectiveFailed, threads.Ending):
            return

    def _begin_next(self) -> None:
        """All that can begin, in the order of the calls. Gloo counts what is begun, and the counts of all ranks have to
        agree: so a second exchange follows its first one at once, whenever that has ended here.
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
        """Of one whose first exchange is over: whether every rank called the same. Else the group has failed."""
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
            # Its connections stay until `abort`: others may not have read yet what this rank has called.
            if self._failed is None:
                self._differs = Differing(self._key, self.rank, self.size)
                self._failed = (
                    "the ranks of this group called different collectives, or other sizes"
                )
            return False
        return True

    def awaited(self, work: GlooWork) -> Any:
        """What of Gloo's has to end before this one goes on; None when it is over. Raises CollectiveFailed."""
        if work.over:
            return None
        if self._failed is None:
            with self._beginning:
                self._begin_next()
                if not work.begun() and self._failed is None:
                    return self._queue[0].first  # this one's, or of one before it
        if not work.begun():
            self._raise_if_failed()
        last = work.rest if work.two else work.first
        return None if last.is_completed() else last

    def conclude(self, work: GlooWork) -> None:
        """Of one that is over: puts its result in place. Raises CollectiveFailed."""
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

    # ---- the end ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._fail("aborted", aborted=True)

    def drain(self, timeout_s: float) -> bool:
        """See `Collectives.drain`."""
        now = time.monotonic()
        deadline, look_at = now + timeout_s, now + _QUIET_S
        if self._beginning.acquire(timeout=timeout_s):  # what another thread just begins counts too
            self._beginning.release()
        before: thread_activity.Runs | None = None
        while any(not work.is_completed() for work in list(self._under_way)):
            now = time.monotonic()
            if now >= look_at:
                # One that lost its wake-up never completes. When all that was read from is cut and read, and the
                # threads that compute sleep on, nobody is left to write.
                self.abort()
                # In a thread of its own: Gloo, cut in the middle of what it does, may never come back from it.
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
        """Frees sockets and threads, within 0.1 s or so: see `Collectives.close`."""
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
        """In a forked child: lets go of the sockets, so that the parent's death closes them."""
        self._failed = "process groups can't be used in a forked child"
        sockets.release_in_child(self._own, self._peers, self._sockets)

    def _fail(self, reason: str, *, aborted: bool = False) -> None:
        # Whoever notices first cuts its own sockets too: else the peers that wait for this rank wait out the timeout.
        if self._failed is None:
            self._aborted = aborted
            self._failed = reason
        sockets.cut(self._own, self._peers, self._sockets)
        self._swapping.abort()
        self._built.set()

    def look(self) -> None:
        """Fails the group if one of its connections is gone, which Gloo may have noticed without waking this rank."""
        if self._connections() < self.size - 1:
            self._fail("the connection to a peer was closed")

    def _time_out(self) -> None:
        """After a cut: makes Gloo close every connection that it left open, and wake who waits for one.

        A receiver or a sender that failed in the middle of a message leaves its connection open: nobody reads or writes
        it again, its thread spins at the end of the stream, and other works wait for it until the timeout. The timeout
        of one receive closes all connections of a group. It's at least a millisecond, so call it off the link thread.
        """
        backend, nothing = self._backend, torch.zeros(1, dtype=torch.uint8, device="cpu")
        if backend is None or self._connections() == 0:
            return
        for peer in range(self.size):
            if peer != self.rank:
                # It timed out, or that one is closed already.
                with contextlib.suppress(RuntimeError):
                    backend.recv([nothing], peer, 0).wait(_AT_ONCE)

    def _connections(self) -> int:
        return sockets.count(self._own, self._peers, self._sockets)

    def wait_for(self, work: Any) -> None:
        """As long as the group waits for a collective. Raises CollectiveFailed."""
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(_short(error))
            raise self.failure(_short(error)) from None

    def failure(self, error: str) -> CollectiveFailed:
        """Why a collective failed: the first cause that this rank saw, then what Gloo says."""
        said = error if self._failed in (None, error) else f"{self._failed}: {error}"
        late = "Timed out" in error and not self._aborted  # Gloo has no other way to say it
        return CollectiveFailed(said, aborted=self._aborted, late=late)

    def mismatched(self, error: TensorMismatch) -> None:
        """Its connections stay until `abort`: the process is to end with this error, and not another rank with a
        connection that was closed.
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
    """It is under way too; what is over goes."""
    while under_way and under_way[0].is_completed():
        under_way.popleft()
    under_way.append(work)


class _Left:
    """A group that can't be freed yet, because that would wait for a work that lost its wake-up: until its timeout.

    Held by a reference that the end of the interpreter does not drop: a thread that it ended in the middle of freeing
    a group would abort the whole process.
    """

    def __init__(self, backend: Any, works: list[Any]) -> None:
        self._held: list[Any] | None = [backend, works]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))

    def done(self) -> bool:
        return self._held is not None and all(work.is_completed() for work in self._held[1])

    def release(self) -> None:
        held, self._held = self._held, None
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))


_left: list[_Left] = []  # freed by whoever closes another group after they have ended


class GlooWork:
    """A collective under way in one group. See `GlooCollectives._call`."""

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
        self.two = second is not None  # exchanges
        self.first: Any = None  # Gloo's, of the first exchange
        self.places: Places | None = None
        self.rest: Any = None  # Gloo's, of the second one
        self.over = False
        self._group = group
        self._concluding = (
            threading.Lock()
        )  # nobody who waits is back before the result is in place

    def begun(self) -> bool:
        """Whether there is nothing left to begin."""
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
        """Waits for as long at most until one of its exchanges has ended. Whether it is over."""
        awaited = self._group.awaited(self)
        if awaited is not None:
            try:
                awaited.wait(timeout)
            # The slice is over; or it has failed, as is found when it is concluded.
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
                # Who has waited may keep this object for long, and they hold tensors.
                self.payload = self.own = self.put = self.compare = self.second = self.then = None


class _Addresses(c10d.Store):
    """The store that Gloo is given: what it publishes is swapped for everyone's at once, then read from memory."""

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
            raise RuntimeError(f"Gloo waits for {missing}, which no rank has published")


def _short(error: Exception) -> str:
    """Gloo's message without the place in its source and without its advice: one line for a log."""
    first = str(error).strip().partition("\n")[0]
    first = re.sub(r"^\[(enforce fail at )?[^]]*\.(cc|h|cpp):\d+\]\s*", "", first)
    return first.partition(". This is typically")[0].strip() or type(error).__name__
