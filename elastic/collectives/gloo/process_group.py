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
from elastic.collectives.gloo import sockets, thread_activity
from elastic.collectives.gloo.sockets import Endpoint
from elastic.collectives.interface import Op, Work
from elastic.collectives.torch_group import REDUCE, MovesBytes, as_bytes
from elastic.errors import CollectiveFailed
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

# What a rank publishes: its listener, what Gloo stored under which key, and its word.
_decoder: msgspec.msgpack.Decoder[tuple[Endpoint, str, bytes, bytes]] = msgspec.msgpack.Decoder(
    tuple[Endpoint, str, bytes, bytes]
)


environment.record_nothing()


class GlooCollectives(MovesBytes):
    """One group of one generation, on CPU tensors. `connect` first; `abort` works at any time, from any thread."""

    scales_inside = False

    def __init__(
        self, rank: int, size: int, timeout_s: float, collective_timeout_s: float | None = None
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
        self._built = threading.Event()  # or given up
        self._swapping = Call()
        self._word = b""
        self._heard: Callable[[list[bytes]], None] = lambda words: None
        self._under_way: collections.deque[Any] = collections.deque()

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
        self._word, self._heard = word, heard
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
        if dtypes_and_ops.goes_directly(carried, self.size):
            return self._allreduce_directly(carried, op, then)
        options = c10d.AllreduceOptions()
        options.reduceOp = REDUCE[op]  # type: ignore[assignment]
        return self.submit("allreduce", [carried], options, then=then)

    def _allreduce_directly(
        self, tensor: torch.Tensor, op: Op, then: Callable[[], object] | None
    ) -> Work:
        """Every rank sends all to every other, and adds up by itself: one way there, where Gloo's ring takes twice as
        many, one after another, as there are ranks.
        """
        flat = tensor.detach().reshape(-1)
        parts = flat.new_empty((self.size, len(flat)))
        split = [parts[0].nbytes] * self.size
        own = as_bytes(flat).repeat(self.size)

        def reduce() -> None:
            tensor.detach().copy_(dtypes_and_ops.total(parts, op).view(tensor.shape))
            if then is not None:
                then()

        return self.submit("alltoall_base", as_bytes(parts), own, split, split, then=reduce)

    def barrier(self) -> Work:
        return self.submit("barrier")

    # ---- messages from one rank to another, in no order with the collectives -----------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> GlooMessage:
        """Contiguous; what is sent to one rank under one tag arrives in this order. `receive` takes as many bytes."""
        return GlooMessage(self, self._begin("send", [as_bytes(tensor)], to, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> GlooMessage:
        """Into a contiguous tensor. None: from whichever rank's message comes first; `GlooMessage.source` tells."""
        if source is None:
            work = self._begin("recv_anysource", [as_bytes(tensor)], tag)
        else:
            work = self._begin("recv", [as_bytes(tensor)], source, tag)
        return GlooMessage(self, work, tensor)

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

    def submit(
        self, name: str, *arguments: Any, then: Callable[[], object] | None = None
    ) -> GlooWork:
        work = self._begin(name, *arguments)
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(work)
        return GlooWork(self, work, then)

    def _begin(self, name: str, *arguments: Any) -> Any:
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
        self._failed = "this is a forked child, and groups stay with the parent"
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

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise CollectiveFailed(self._failed, aborted=self._aborted)


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
    """A collective under way in one group; ``then`` puts the result in place."""

    def __init__(
        self, group: GlooCollectives, work: Any, then: Callable[[], object] | None
    ) -> None:
        self._group = group
        self._work = work
        self._complete = threads.Completion(then)

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def within(self, timeout_s: float) -> bool:
        if not self._slice(timedelta(seconds=timeout_s)):
            self._group._raise_if_failed()
            return False
        return True

    def wait(self) -> None:
        for turn in itertools.count(1):
            if self._slice(_SLICE):
                break
            if turn % _LOOK_EVERY == 0:
                self._group.look()
            self._group._raise_if_failed()
        self._complete()

    def _slice(self, timeout: timedelta) -> bool:
        try:
            self._work.wait(timeout)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # With this error, or well, a moment after the slice was over: asked again, it says which.
            self._conclude()
        return True

    def _conclude(self) -> None:
        """The outcome of a completed work. Returns at once."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._group._fail(_short(error))
            raise self._group.failure(_short(error)) from None


class GlooMessage:
    """A message under way. Gloo says that it is done to who waits for it, and a wait that ends too soon closes the
    connection: so it is waited for as long as for a collective, or until the sockets are cut.
    """

    def __init__(self, group: GlooCollectives, work: Any, held: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._held = held
        self._done = False

    @property
    def source(self) -> int:
        """Of one that has been received: from which rank."""
        return int(self._work._source_rank())

    def done(self) -> bool:
        return self._done

    def within(self, timeout_s: float) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        if not self._done:
            self._group.wait_for(self._work)
            self._done = True


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
