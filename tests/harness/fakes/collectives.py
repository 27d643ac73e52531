"""Collectives among threads of one process, for tests: no socket, no backend, every failure on demand.

The ranks of a `world` share a list of rounds. A rank's n-th call joins round n; the last one to join computes the
results of all. Aborting one rank breaks the others, as cut sockets do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.collectives import dtypes_and_ops
from elastic.collectives.interface import Op, Work
from elastic.errors import CollectiveFailed

_FOLD: dict[Op, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}


def world(size: int, timeout_s: float = 10.0) -> list[FakeCollectives]:
    """The ranks of one group, each for a separate thread."""
    shared = _Shared(size, timeout_s)
    return [FakeCollectives(rank, shared) for rank in range(size)]


@dataclass
class _Round:
    kind: str
    calls: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    complete: bool = False


class _Shared:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.rounds: dict[int, _Round] = {}
        self.broken: str | None = None
        self.aborted = False  # by an abort

    def fail(self, reason: str, *, aborted: bool = False) -> None:
        with self.changed:
            if self.broken is None:
                self.broken, self.aborted = reason, aborted
            self.changed.notify_all()


class FakeCollectives:
    """One rank of a fake group."""

    scales_inside = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = shared.size
        self._shared = shared
        self._calls = 0

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        dtypes_and_ops.check(tensor, op)
        kind = f"allreduce {op.name} {tensor.numel()} {tensor.dtype} times {scale} over {divisor}"
        return self._join(kind, tensor, op, scale, divisor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._join(f"broadcast {root} {tensor.numel()} {tensor.dtype}", tensor, root)

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._join(f"allgather {tensor.numel()} {tensor.dtype}", outputs, tensor)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        return self._join("alltoall", output, tensor, received, sent)

    def barrier(self) -> Work:
        return self._join("barrier")

    def abort(self) -> None:
        self._shared.fail("aborted", aborted=True)

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.abort()

    def close_in_forked_child(self) -> None:
        self._shared.broken = "this is a forked child"

    def _join(self, kind: str, *arguments: Any) -> Work:
        shared = self._shared
        with shared.changed:
            if shared.broken is not None:
                raise CollectiveFailed(shared.broken, aborted=shared.aborted)
            number, self._calls = self._calls, self._calls + 1
            joined = shared.rounds.setdefault(number, _Round(kind))
            if joined.kind != kind:
                shared.fail(f"rank {self.rank} called {kind}, another rank {joined.kind}")
            joined.calls[self.rank] = arguments
            if len(joined.calls) == shared.size and shared.broken is None:
                _compute(joined)
                joined.complete = True
                del shared.rounds[number]
                shared.changed.notify_all()
        return _FakeWork(shared, joined)


class _FakeWork:
    def __init__(self, shared: _Shared, joined: _Round) -> None:
        self._shared = shared
        self._joined = joined

    def done(self) -> bool:
        return self._joined.complete or self._shared.broken is not None

    def within(self, timeout_s: float) -> bool:
        with self._shared.changed:
            done = self._shared.changed.wait_for(self.done, timeout_s)
        if done:
            self.wait()
        return done

    def wait(self) -> None:
        with self._shared.changed:
            if not self._shared.changed.wait_for(self.done, self._shared.timeout_s):
                self._shared.fail(f"{self._joined.kind} timed out")
        if not self._joined.complete:
            raise CollectiveFailed(str(self._shared.broken), aborted=self._shared.aborted)


def _compute(joined: _Round) -> None:
    """Compute every rank's result, once all arguments of a round are here."""
    calls = [joined.calls[rank] for rank in sorted(joined.calls)]
    match joined.kind.split()[0]:
        case "allreduce":
            total = calls[0][0].clone()
            carried, then = dtypes_and_ops.carried(total, *calls[0][1:])
            for tensor, op, *_ in calls[1:]:
                other, _ = dtypes_and_ops.carried(tensor.view_as(total), op)
                carried.copy_(_FOLD[op](carried, other))
            if then is not None:
                then()
            for tensor, *_ in calls:
                tensor.copy_(total.view_as(tensor))
        case "broadcast":
            source = calls[calls[0][1]][0].clone()
            for tensor, _ in calls:
                tensor.copy_(source.view_as(tensor))
        case "allgather":
            parts = [tensor.clone() for _, tensor in calls]
            for outputs, _ in calls:
                for output, part in zip(outputs, parts, strict=True):
                    output.copy_(part.view_as(output))
        case "alltoall":
            parcels = [torch.split(tensor, sent) for _, tensor, _, sent in calls]
            for rank, (output, _, received, _) in enumerate(calls):
                rows = torch.cat([parcel[rank] for parcel in parcels])
                assert [len(parcel[rank]) for parcel in parcels] == received
                output.copy_(rows)
