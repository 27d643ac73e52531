"""Works of the process group: ``torch.distributed.Work`` objects with futures.

A future is completed by the thread that waits for its work. For a collective that begins in a backward pass, such as
DDP's reductions, this is the training thread at the end of the pass: DDP then waits for all its buckets, and a
failure is raised there rather than within torch. A separate thread completes futures that other code waits for.
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

from elastic.collectives import threads_at_exit
from elastic.collectives.interface import ReportsMissingRanks, StreamOrdered, Work
from elastic.errors import CollectiveFailed, TensorMismatch
from elastic.protocol import calls
from elastic.torch_backend.collective_calls import CollectiveCall

if TYPE_CHECKING:
    from elastic.collectives.interface import MessageWork

# seconds for which the training thread may complete a future before the separate thread does
_GRACE_S = 0.02
_IDLE_S = 0.1  # seconds after which an idle thread ends; the process waits for it at exit
_SLICE_S = 0.1
_NAMED = 8  # maximum number of ranks to name in a message


_TorchWork: Any = distributed.Work
# Whether futures requested by this thread are completed immediately.
_at_once: ContextVar[bool] = ContextVar("_at_once", default=False)


@contextmanager
def complete_at_once() -> Iterator[None]:
    """Context manager in which futures that this thread requests are completed immediately.

    Their callbacks run when they are registered.
    """
    before = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(before)


class WorkOwner(Protocol):
    """Interface of the process group that owns a work."""

    def generation(self) -> int:
        """Return the generation of the current world."""

    def guard(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager in which the training thread waits for the collective ``name``."""

    def in_world(self, rank: int) -> int:
        """Convert a rank of this group to a rank of the world."""

    def broke(self, error: CollectiveFailed, generation: int) -> None:
        """Report a failed collective of a world, from a thread of this package. This method never raises."""

    def settles(self) -> bool:
        """Return whether `Runtime.settle` is called before values are committed."""


class ElasticWork(_TorchWork):  # type: ignore[misc]
    """Work of one call of the process group.

    Several threads may wait for it. Each receives the same outcome.

    Args:
        results: the tensors that its future returns, as with torch's own works.
        read_later: whether the script reads the results later. If so, the training stream waits for them instead of the
            host, unless an invalid value could do harm before the next commit.
    """

    def __init__(
        self,
        owner: WorkOwner,
        name: str,
        begun: CollectiveCall,
        results: list[torch.Tensor],
        timeout_s: float | None,
        futures: Futures,
        *,
        read_later: bool = False,
    ) -> None:
        super().__init__()
        self._owner = owner
        self._name = name
        self._begun: CollectiveCall | None = begun
        self._results = results
        self._timeout_s = timeout_s
        self._futures = futures
        self.read_later = read_later
        self.generation = owner.generation()  # generation in which the collective began
        self._lock = threading.RLock()
        self._error: CollectiveFailed | TensorMismatch | None = None
        self._future: ElasticFuture | None = None
        self.message: MessageWork | None = None  # the message to receive, or None for other calls

    # ---- torch.distributed.Work --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective, and copy the results to the script's tensors.

        On a side stream of a GPU, only the stream waits: FSDP2 queues a whole step on such streams, ahead of the GPU.
        On the default stream, see ``read_later``.

        Args:
            timeout: defaults to the process group's timeout. If given, the host waits, as with torch's NCCL.

        Raises:
            PeerLost: a rank was lost, in an elastic job.
            CollectiveFailed: a rank was lost or the timeout expired, in a job of fixed size. A RuntimeError.
            TensorMismatch: the message does not fit the tensor.
        """
        # calls from C++ pass a timeout of 0
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        limit_s = asked_s or self._timeout_s
        # A work of an earlier world: its outcome must not affect the current world, so the guard is not used.
        if self.generation != self._owner.generation():
            self.complete(limit_s)
            return True
        with self._owner.guard(self._name), recorded(f"{self._name} wait"):
            if asked_s or not self.may_follow() or not self.follow():
                self.complete(limit_s)
        return True

    def may_follow(self) -> bool:
        """Return whether the current stream may wait for the results instead of the host.

        Integers may be indices. If an index is invalid, a kernel reads beyond a tensor, and every later CUDA call of
        the process fails.
        """
        if _on_side_stream():
            return True
        floats = all(each.is_floating_point() or each.is_complex() for each in self._results)
        return self.read_later and bool(self._results) and floats and self._owner.settles()

    @property
    def ordered(self) -> bool:
        """Return whether a stream can wait for the work."""
        begun = self._begun
        return begun is None or all(isinstance(work, StreamOrdered) for work in begun.works)

    def follow(self) -> bool:
        """Make the current stream wait for the collective, and copy the results to the script's tensors on that stream.

        Return False if the underlying works do not support this.

        Raises:
            CollectiveFailed: the group has failed already.
        """
        with self._lock:
            begun = self._begun
            if begun is None or self._future is not None:
                return False
            works = [work for work in begun.works if isinstance(work, StreamOrdered)]
            if len(works) != len(begun.works):
                return False
            for work in works:
                work.follow(self._timeout_s)
            for then in begun.thens:
                then()
            self._begun = None
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
            pass  # wait() raises the error
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> CollectiveFailed | TensorMismatch | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        """Return the rank that sent the message."""
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

    # ---- completion --------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self._begun is None

    def complete(self, limit_s: float | None) -> None:
        """Wait for the collective, and copy the results to the script's tensors. Idempotent.

        Raises:
            CollectiveFailed: a rank was lost or the timeout expired.
            TensorMismatch: the message does not fit the tensor.
        """
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
        ranks = self._owner.in_world
        named = [structs.replace(each, rank=ranks(each.rank)) for each in error.calls]
        return TensorMismatch(calls.message_sentence(named), calls=named)

    def _settle(self, future: ElasticFuture) -> None:
        future.forget_work()
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)


setattr(ElasticWork, "_source_rank", ElasticWork.source_rank)  # noqa: B010 - torch's name for it


def _on_side_stream() -> bool:
    """Return whether the current stream of the current GPU is not its default stream."""
    return (
        torch.cuda.is_initialized() and torch.cuda.current_stream() != torch.cuda.default_stream()
    )


def recorded(what: str) -> AbstractContextManager[object]:
    """Record the block in torch's profiler, if it is active."""
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
            cause, missing = "the other ranks did not join", []
            if isinstance(work, ReportsMissingRanks):
                missing = sorted(map(owner.in_world, work.missing()))
                cause = late(missing)
            raise CollectiveFailed(
                f"{name}: Timed out after {limit_s:g} s: {cause}. Call the same collectives on all ranks, or pass a"
                " longer timeout",
                late=True,
                rank=missing[0] if missing else None,
            )
    work.wait()


def late(missing: list[int]) -> str:
    """Return an error message that names the ranks of the world that did not arrive in time."""
    if not missing:
        return "all ranks have joined, but the transfer did not finish in time"
    listed = ", ".join(map(str, missing[:_NAMED]))
    more = f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
    return f"rank{'s' if missing[1:] else ''} {listed}{more} did not join"


class ElasticFuture(torch.futures.Future):  # type: ignore[type-arg]
    """Future with a ``wait`` that completes its work in Python."""

    def __init__(self, work: ElasticWork) -> None:
        super().__init__()
        self._work: ElasticWork | None = work

    def forget_work(self) -> None:
        """Drop the work once it is complete."""
        self._work = None

    def wait(self) -> Any:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return super().wait()


class Futures:
    """Futures of one process group, in the order of their requests."""

    def __init__(self, owner: WorkOwner) -> None:
        self._owner = owner
        self._pending: collections.deque[tuple[float, ElasticWork]] = collections.deque()
        self._changed = threading.Condition()
        self._passes: set[int] = set()  # IDs of backward passes with a pending call of `_end_pass`
        self._ending = False
        self._thread: threading.Thread | None = None

    def follow(self, work: ElasticWork) -> None:
        """Ensure that the work's future will be completed."""
        number = torch._C._current_graph_task_id()
        grace = number != -1 and not self._ending
        if grace and number not in self._passes:
            self._passes = {number}  # drops the IDs of failed passes, which no callback removes
            Variable._execution_engine.queue_callback(self._end_pass)
        due = time.monotonic() + (_GRACE_S if grace else 0.0)
        with self._changed:
            if self._pending and self._pending[0][1].generation != work.generation:
                self._pending.clear()  # works of an earlier world, whose outcome is irrelevant
            self._pending.append((due, work))
            if self._thread is None:
                self._thread = threads_at_exit.begin("elastic-futures", self._serve)
            elif not grace:
                self._changed.notify()

    def _end_pass(self) -> None:
        """Wait for pending works at the end of a backward pass, in the training thread.

        ``backward()`` raises their errors.
        """
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
                # Return works that have already failed, so that their errors are raised at the end of the pass.
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
                pass  # stored in the work, whose future raises it
            except threads_at_exit.ProcessExiting:
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
    """Combine several works in flight into one work."""
    begun = CollectiveCall()
    inner = _OrderedInner if all(work.ordered for work in works) else _Inner
    begun.works = [inner(work) for work in works]
    results = [tensor for work in works for tensor in work.result()]
    later = all(work.read_later for work in works)
    return ElasticWork(owner, name, begun, results, None, futures, read_later=later)


class _Inner:
    """Adapter from torch's `Work` to `elastic.collectives.interface.Work`."""

    def __init__(self, work: ElasticWork) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def within(self, timeout_s: float) -> bool:
        self._work.complete(None)
        return True

    def wait(self) -> None:
        self._work.complete(None)


class _OrderedInner(_Inner):
    """Adapter like `_Inner`, for a work that a stream can wait for."""

    def follow(self, limit_s: float | None = None) -> None:
        if not self._work.follow():
            self._work.complete(None)
