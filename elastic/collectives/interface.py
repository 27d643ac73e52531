"""The seam under every collective: one group of ranks, of one generation, on one backend.

Nothing above this seam knows Gloo or NCCL; nothing below it knows State, the optimizer or the driver. Every tensor is
contiguous and lies on the group's device. Ranks here are indices in the group.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

# From here on a tensor is reduced alone, from and to its own memory: copying it into a buffer with others, and back,
# would cost more than it saves. By measurement over Gloo, see benchmarks/negotiation.py.
ALONE_BYTES = 1 << 20
# Of a message: some backends need what lies above, and torch has 31 bits.
MAX_TAG = (1 << 30) - 1


class Op(enum.IntEnum):
    """Reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Work(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Whether `wait` would return at once (or raise at once)."""

    def within(self, timeout_s: float) -> bool:
        """As `wait`, for so long at most. Whether it is done."""

    def wait(self) -> None:
        """Blocks until the result is in place. Raises CollectiveFailed if the group broke or was aborted."""


@runtime_checkable
class KnowsWhoIsMissing(Protocol):
    """A work under way that can tell."""

    def missing(self) -> list[int]:
        """Ranks of the group that have not called it yet, or the oldest collective before it that is not over."""


class Collectives(Protocol):
    """All calls are asynchronous, in the same order on every rank. Only SUM, MIN, MAX and PRODUCT reach this seam."""

    rank: int
    size: int
    # Whether `allreduce` scales and divides while it reduces, at no cost, and sums of float16 and bfloat16 in
    # float32, so that they can't overflow before that. The same on every rank.
    scales_inside: bool

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        """In place; every rank's tensor has the same number of elements and dtype.

        The result is multiplied by ``scale`` and then divided by ``divisor``, which are the same on every rank;
        integers ignore both. An average is a sum with a divisor: times 1/n differs from it in the last bit.
        """

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """In place, from rank ``root``."""

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """``outputs[r]`` becomes rank r's tensor; all have one shape."""

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        """Rows along dimension 0: ``sent[r]`` rows go to rank r, ``received[r]`` rows come from it."""

    def barrier(self) -> Work:
        """Done when every rank has called it."""

    def abort(self) -> None:
        """From any thread, any number of times, never blocks: what waits or is called later raises CollectiveFailed."""

    def drain(self, timeout_s: float) -> bool:
        """After `abort`: waits until no collective of this group writes into any tensor, ``timeout_s`` at most.

        Returns whether that is so. Call it before tensors that were under way are written again.
        """

    def close(self) -> None:
        """Frees sockets and threads. May take tens of milliseconds: call it off the critical path, after `abort`."""


@runtime_checkable
class ReducesInto(Protocol):
    """A group that can leave a reduction in other memory at no cost: nobody has to copy the tensor first."""

    def allreduce_into(
        self,
        result: torch.Tensor,
        tensor: torch.Tensor,
        op: Op,
        scale: float = 1.0,
        divisor: int = 1,
    ) -> Work:
        """As `Collectives.allreduce` of ``tensor``, which is only read. ``result`` is like it; they share no memory."""


class MessageWork(Work, Protocol):
    """One under way."""

    @property
    def source(self) -> int:
        """Of one that has been received: from which rank."""


class Messenger(Protocol):
    """A group that carries messages from one rank to another, and nothing else. Ranks and tensors as above."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> MessageWork:
        """What is sent to one rank under one tag, of 0 to MAX_TAG, arrives in this order."""

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """None: from whichever rank's message comes first; `MessageWork.source` tells. Waiting for it raises
        TensorMismatch if what was sent has another dtype or number of elements, and names both.
        """

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Blocks. Rank 0 waits for each of the others. Raises CollectiveFailed, which there says who did not come: the
        first of them, or with ``wait_all_ranks`` all. No message can be sent after that.
        """
