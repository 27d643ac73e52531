"""What a collective of the process group returns: a ``torch.distributed.Work`` with a future. Acts.

A future is completed by whoever waits for its work. That of a collective that begins in a backward pass, as those of
DDP's buckets do, is completed when the pass ends, by the thread that trains: DDP waits for all its buckets right after
that, and a break is raised there and not within torch. For futures that somebody else waits for there is a thread.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from msgspec import structs
from torch import distributed
from torch.autograd import Variable

from elastic.collectives import threads
from elastic.collectives.interface import KnowsWhoIsMissing, Work
from elastic.errors import CollectiveFailed, TensorMismatch
from elastic.protocol import calls
from elastic.torch_backend.collective_calls import Begun

if TYPE_CHECKING:
    from elastic.collectives.interface import MessageWork

_GRACE_S = 0.02  # that the thread leaves to the thread that trains
_IDLE_S = 0.1  # after which the thread ends: the end of the process waits for it
_SLICE_S = 0.1
_NAMED = 8  # ranks in one sentence


_TorchWork: Any = distributed.Work
# Of the thread that asks for a future: whether it waits for the work.
_at_once: ContextVar[bool] = ContextVar("_at_once", default=False)


@contextmanager
def complete_at_once() -> Iterator[None]:
    """Futures that this thread asks for meanwhile are complete: what is attached to them runs here, at once."""
    before = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(before)


class WorkOwner(Protocol):
    """The process group of a work."""

    def generation(self) -> int:
        """Of the present world."""

    def guard(self, name: str) -> AbstractContextManager[None]:
        """Around what waits in the thread that trains."""

    def in_world(self, rank: int) -> int:
        """The rank in the world of a rank of this group."""

    def broke(self, error: CollectiveFailed, generation: int) -> None:
        """A collective of that world failed in a thread of ours. Never raises."""


class ElasticWork(_TorchWork):  # type: ignore[misc]
    """One call of the process group. ``results`` is what its future gives: tensors, as torch's own works have it.

    Threads may wait for it together; each raises what became of it.
    """

    def __init__(
        self,
        owner: WorkOwner,
        name: str,
        begun: Begun,
        results: list[torch.Tensor],
        timeout_s: float | None,
        futures: Futures,
    ) -> None:
        super().__init__()
        self._owner = owner
        self._name = name
        self._begun: Begun | None = begun
        self._results = results
        self._timeout_s = timeout_s
        self._futures = futures
        self.generation = owner.generation()  # of the world in which it was begun
        self._lock = threading.RLock()
        self._error: CollectiveFailed | TensorMismatch | None = None
        self._future: ElasticFuture | None = None
        self.message: MessageWork | None = None  # that it receives

    # ---- torch.distributed.Work --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises PeerLost in a job that can recover, CollectiveFailed (a RuntimeError) in one of a fixed size, also
        after ``timeout``, by default that of the process group. TensorMismatch for a message that does not fit.
        """
        limit_s: float | None = timeout.total_seconds() if timeout is not None else 0.0
        limit_s = limit_s or self._timeout_s
        # What became of it is known, and concerns no other world.
        if self.generation != self._owner.generation():
            self.complete(limit_s)
            return True
        with self._owner.guard(self._name), recorded(f"{self._name} wait"):
            self.complete(limit_s)
        return True

    def is_completed(self) -> bool:
        begun = self._begun
        if begun is None:
            return True
        if not all(work.done() for work in begun.works):
            return False
        try:
            self.complete(self._timeout_s)
        except CollectiveFailed as error:
            self._owner.broke(error, self.generation)
        except TensorMismatch:
            pass  # whoever waits raises it
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> CollectiveFailed | TensorMismatch | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        """Of a message: the rank that has sent it."""
        return -1 if self.message is None else self.message.source

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> ElasticFuture:
        if _at_once.get():
            self.wait()
        with self._lock:
            if self._future is None:
                self._future = ElasticFuture(self)
                if self._begun is None:
                    self._settle(self._future)
                else:
                    self._futures.follow(self)
            return self._future

    # ---- what completes it -------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self._begun is None

    def complete(self, limit_s: float | None) -> None:
        """Waits and puts the results in place, once. Raises CollectiveFailed, TensorMismatch."""
        with self._lock:
            if self._begun is not None:
                try:
                    for work in self._begun.works:
                        _wait(work, limit_s, self._name, self._owner)
                    for then in self._begun.thens:
                        then()
                except CollectiveFailed as error:
                    self._error = error
                except TensorMismatch as error:
                    self._error = self._in_world(error)
                self._begun = None
                if self._future is not None:
                    self._settle(self._future)
        if self._error is not None:
            raise self._error.again()

    def _in_world(self, error: TensorMismatch) -> TensorMismatch:
        """With the world's numbers of the ranks, which in ``error`` are the group's."""
        ranks = self._owner.in_world
        named = [structs.replace(each, rank=ranks(each.rank)) for each in error.calls]
        return TensorMismatch(calls.message_sentence(named), calls=named)

    def _settle(self, future: ElasticFuture) -> None:
        """What it calls may wait for the future, or for this work."""
        future.forget_work()
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)


setattr(ElasticWork, "_source_rank", ElasticWork.source_rank)  # noqa: B010 - torch's name for it


def recorded(what: str) -> AbstractContextManager[object]:
    """Shows it in a profile of torch's, if one is being made."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"elastic:{what}")
    return nullcontext()


def _wait(work: Work, limit_s: float | None, name: str, owner: WorkOwner) -> None:
    if limit_s is None:
        work.wait()
        return
    until = time.monotonic() + limit_s
    while not work.within(min(_SLICE_S, max(until - time.monotonic(), 0.0))):
        if time.monotonic() >= until:
            who, missing = "the other ranks did not come", []
            if isinstance(work, KnowsWhoIsMissing):
                missing = sorted(map(owner.in_world, work.missing()))
                who = late(missing)
            raise CollectiveFailed(
                f"{name}: Timed out after {limit_s:g} s: {who}",
                late=True,
                rank=missing[0] if missing else None,
            )
    work.wait()


def late(missing: list[int]) -> str:
    """Who did not come in time, of the ranks of the world."""
    if not missing:
        return "all ranks have come, and need more time for this much"
    listed = ", ".join(map(str, missing[:_NAMED]))
    more = f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
    return f"rank{'s' if missing[1:] else ''} {listed}{more} did not come"


class ElasticFuture(torch.futures.Future):  # type: ignore[type-arg]
    """Who waits for it in Python completes its work."""

    def __init__(self, work: ElasticWork) -> None:
        super().__init__()
        self._work: ElasticWork | None = work

    def forget_work(self) -> None:
        """It is over."""
        self._work = None

    def wait(self) -> Any:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return super().wait()


class Futures:
    """Those of one process group, in the order in which they were asked for."""

    def __init__(self, owner: WorkOwner) -> None:
        self._owner = owner
        self._pending: collections.deque[tuple[float, ElasticWork]] = collections.deque()
        self._changed = threading.Condition()
        self._passes: set[int] = set()  # backward passes that will end with `_end_pass`
        self._ending = False
        self._thread: threading.Thread | None = None

    def follow(self, work: ElasticWork) -> None:
        """Sees to it that its future will be completed."""
        number = torch._C._current_graph_task_id()
        grace = number != -1 and not self._ending
        if grace and number not in self._passes:
            self._passes = {number}  # passes that have ended by an error leave nothing else behind
            Variable._execution_engine.queue_callback(self._end_pass)
        due = time.monotonic() + (_GRACE_S if grace else 0.0)
        with self._changed:
            if self._pending and self._pending[0][1].generation != work.generation:
                self._pending.clear()  # of a world that is over: what became of them is nobody's concern
            self._pending.append((due, work))
            if self._thread is None:
                self._thread = threads.begin("elastic-futures", self._serve)
            elif not grace:
                self._changed.notify()

    def _end_pass(self) -> None:
        """At the end of a backward pass, in the thread that trains. What it raises, ``backward()`` raises."""
        self._passes = set()
        self._ending = True
        try:
            while (work := self._first()) is not None:
                work.wait()
        finally:
            self._ending = False

    def _first(self) -> ElasticWork | None:
        with self._changed:
            while self._pending and self._pending[0][1].over:
                _, work = self._pending.popleft()
                # One that failed while nobody looked is raised where the pass ends.
                if work.exception() is not None:
                    return work
            return self._pending[0][1] if self._pending else None

    def _serve(self) -> None:
        while (work := self._next_due()) is not None:
            try:
                work.complete(None)
            except CollectiveFailed as error:
                self._owner.broke(error, work.generation)
            except TensorMismatch:
                pass  # its future has it
            except threads.Ending:
                return
            del work

    def _next_due(self) -> ElasticWork | None:
        with self._changed:
            idle_at = time.monotonic() + _IDLE_S
            while True:
                now = time.monotonic()
                waiting = ((due, work) for due, work in self._pending if not work.over)
                due, work = next(waiting, (idle_at, None))
                if due <= now:
                    if work is None:
                        self._thread = None
                        self._pending.clear()
                    return work
                self._changed.wait(due - now)


def joined(owner: WorkOwner, name: str, works: list[ElasticWork], futures: Futures) -> ElasticWork:
    """One work for several that are under way."""
    begun = Begun()
    begun.works = [_Inner(work) for work in works]
    results = [tensor for work in works for tensor in work.result()]
    return ElasticWork(owner, name, begun, results, None, futures)


class _Inner:
    """A work of the process group, as one of a group."""

    def __init__(self, work: ElasticWork) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def within(self, timeout_s: float) -> bool:
        self._work.complete(None)
        return True

    def wait(self) -> None:
        self._work.complete(None)
