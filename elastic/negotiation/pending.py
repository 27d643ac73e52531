"""Collectives that this rank has submitted, until their results are available.

`engine` decides which collectives start and when. This module contains the interface for waiting threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from elastic.collectives.algorithms import broadcast_allgather_alltoall, reductions
from elastic.collectives.algorithms.reductions import Started
from elastic.collectives.interface import Collectives, Op, Work
from elastic.errors import CollectiveFailed, PeerLost
from elastic.monitoring import timeline
from elastic.negotiation.messages import ALLTOALL, Members, Request, Response

_dtype_names: dict[torch.dtype, str] = {}


class Driver(Protocol):
    """Engine methods that `Pending` calls. Implemented by `engine.Engine`."""

    @property
    def failed(self) -> bool: ...

    def complete(self, pending: Pending) -> None: ...

    def drain(self, pending: Pending) -> None: ...

    def offer(self) -> None: ...

    def drive(self, done: Callable[[], bool], until: float | None) -> None: ...


class FusedBatch:
    """Collectives that were started together. Any waiter may finish the batch; the first one does."""

    def __init__(self, started: Started, rows: Sequence[str], backend: str, began_ns: int) -> None:
        self._works: list[Work]
        self._works, self._finish = started
        self._lock = threading.Lock()
        self._results: Any = None
        self._finished = False
        self._rows = rows  # row names in the timeline
        self._backend = backend
        self._began_ns = began_ns

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def results(self) -> Any:
        """Return the results of all collectives of the batch. Call `wait` first."""
        with self._lock:
            if not self._finished:
                waited_ns = timeline.now_ns() if timeline.on else 0
                with torch.no_grad():
                    self._results = self._finish()
                self._finished = True
                if timeline.on and self._rows:
                    timeline.spans(self._rows, self._backend, self._began_ns, waited_ns)
                    out = "MEMCPY_OUT_FUSION_BUFFER"
                    timeline.spans(self._rows, out, waited_ns, timeline.now_ns())
                    for row in self._rows:
                        timeline.end(row)
            return self._results


class Pending:
    """Collective that this rank has submitted. Any thread may wait for it.

    Thousands may be in flight, so the object has plain fields and no closures, which keeps garbage collection cheap.
    """

    __slots__ = (
        "_batch",
        "_engine",
        "_part",
        "_ready",
        "_value",
        "decided",
        "device",
        "error",
        "into",
        "key",
        "kind",
        "lasting",
        "members",
        "name",
        "noted",
        "op",
        "payload",
        "root",
        "scales",
        "splits",
        "tensors",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        members: Members,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        *,
        op: int = 0,
        root: int = 0,
        scales: tuple[float, float] = (1.0, 1.0),
        splits: tuple[int, ...] = (),
        payload: str = "",
        into: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name  # name; if empty, the engine generates one from a counter
        self.members = members
        self.tensors = tensors
        self.device = device
        self.op = op
        self.root = root
        self.scales = scales
        self.splits = splits
        self.payload = payload
        self.into = into
        self.lasting = bool(name) and bool(tensors)
        self.key: Hashable = None
        # whether the coordinator's decision was received, so that the collective has started or failed
        self.decided = False
        self.noted = False  # for a join: whether the coordinator has recorded it
        self.error: BaseException | None = None
        self._engine: Driver | None = None
        self._batch: FusedBatch | None = None
        # slice of the batch's results that belongs to this collective
        self._part: tuple[int, int] | None = None
        self._value: Any = None
        self._ready: Any = None
        # Record the event now: another thread may start the collective later, on a different stream.
        if device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record()

    def make_key(self) -> Hashable:
        """Return a cache key. Two keys are equal if and only if their requests are equal."""
        tensors = self.tensors
        if len(tensors) == 1:
            described: Hashable = (tensors[0].dtype, tensors[0].shape)
        else:
            described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        return self.name, described, self.device.type, self.op, self.root, self.scales, self.splits

    def request(self) -> Request:
        return Request(
            self.kind,
            self.name,
            tuple([(_dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in self.tensors]),
            self.device.type,
            self.op,
            self.root,
            self.scales,
            self.splits,
            self.payload,
            self.lasting,
        )

    def row(self) -> str:
        """Return the name of the collective's row in the timeline."""
        return row(self.name, self.members)

    def begin(self, group: Collectives, response: Response) -> Started:
        """Start the collective without fusion. This method is not used for an allreduce, which may share a buffer."""
        match self.kind:
            case "allgather":
                return broadcast_allgather_alltoall.allgather(group, self.tensors, response.rows)
            case "alltoall":
                return broadcast_allgather_alltoall.alltoall(group, self.tensors[0], response.rows)
            case "broadcast":
                root = self.members.index(self.root) if self.members else self.root
                root = root if group.size > 1 else 0
                return broadcast_allgather_alltoall.broadcast(
                    group, self.tensors[0], root, self.into is not None
                )
        parts = [
            reductions.reducescatter(group, tensor, Op(self.op), *self.scales)
            for tensor in self.tensors
        ]
        return [work for works, _ in parts for work in works], lambda: [end() for _, end in parts]

    # ---- interface of `Work` ---------------------------------------------------------------------------------------

    def done(self) -> bool:
        if not self.decided:
            return self._engine is not None and self._engine.failed
        if self.error is not None or self._batch is None or self._batch.done():
            return True
        # After a failure of the engine, a wait raises an error immediately.
        return self._engine is not None and self._engine.failed

    def over(self, error: BaseException) -> bool:
        """Return whether an error raised by a wait ended the collective, rather than only interrupting the wait."""
        if error is self.error or isinstance(error, CollectiveFailed | PeerLost):
            return True
        return self._engine is None or self._engine.failed

    def wait(self) -> None:
        """Wait until the collective has completed.

        Raises:
            CollectiveFailed: a rank was lost, or the engine was aborted.
            TensorMismatch: the ranks submitted different tensors under this name.
            Exception: the backend failed to start the collective; its exception is raised unchanged.
        """
        if not self.decided:
            assert self._engine is not None
            self._engine.complete(self)
        if self.error is not None:
            raise self.error
        if self._batch is not None:
            self._batch.wait()

    def offer(self) -> None:
        """Send the queued request now.

        This method is not needed before a wait, which sends the request itself.
        """
        if self._engine is not None:
            self._engine.offer()

    def drive(self, done: Callable[[], bool], until: float | None) -> None:
        """Exchange messages until ``done()`` returns True. See `Engine.drive`."""
        if self._engine is not None:
            self._engine.drive(done, until)

    def result(self) -> Any:
        """Return the result. Call `wait` first."""
        if self._batch is None:
            return self._value
        results = self._batch.results()
        return results if self._part is None else results[self._part[0] : self._part[1]]

    # ---- interface for the engine ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Receive a decision that was made before the world ended. This method is called after its end."""
        if self._engine is not None and not self.decided:
            self._engine.drain(self)

    def submitted_to(self, engine: Driver) -> None:
        self._engine = engine

    def started(self, batch: FusedBatch, part: tuple[int, int] | None = None) -> None:
        self._batch, self._part = batch, part
        self.decided = True

    def settled(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value, self.error = value, error
        self.decided = True

    def targets(self) -> Sequence[torch.Tensor | None]:
        """Return the tensor that receives each allreduce result. See `reductions.allreduce`."""
        return [None] * len(self.tensors) if self.into is None else self.into

    def await_tensors(self) -> None:
        """Make the current stream of a GPU wait for the work that was queued before the collective was submitted."""
        if self._ready is not None:
            self._ready.wait()


def run_alone(pending: Pending, group: Collectives) -> None:
    """Complete a collective without negotiation, in a world or process set of one rank."""
    match pending.kind:
        case "agree":
            pending.settled((pending.payload,))
        case "join":
            pending.settled(group.rank)
        case "barrier":
            pending.settled()
        case "allreduce":
            with torch.no_grad():
                started = reductions.allreduce(
                    group, pending.tensors, Op(pending.op), *pending.scales, pending.targets()
                )
            pending.started(FusedBatch(started, (), "", 0))
        case kind:
            counts = tuple(len(t) if t.dim() else 0 for t in pending.tensors)
            rows = pending.splits if kind == ALLTOALL else counts
            with torch.no_grad():
                started = pending.begin(group, Response(pending.request(), rows=(rows,)))
            pending.started(FusedBatch(started, (), "", 0))


def row(name: str, members: Members) -> str:
    """Return the name of a collective's row in the timeline. Each process set has its own row for the name."""
    return f"{name} of {list(members)}" if members else name


def _dtype_name(dtype: torch.dtype) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name
