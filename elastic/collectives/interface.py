"""Interface of collectives. An implementation serves one group of ranks of one generation over one backend.

Callers do not depend on Gloo or NCCL. Implementations do not depend on State, the optimizer or the driver. Every tensor
is contiguous and on the group's device. Ranks are indices in the group.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

# A tensor of at least this size is reduced separately and in place, since copying it to a shared buffer and back would
# cost more than it saves (measured over Gloo, see benchmarks/negotiation.py).
ALONE_BYTES = 1 << 20
# maximum tag of a message: torch's tags have 31 bits, and some backends use larger ones internally
MAX_TAG = (1 << 30) - 1


class Op(enum.IntEnum):
    """Reduction operations, numbered as in Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Work(Protocol):
    """A collective in flight."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise immediately."""

    def within(self, timeout_s: float) -> bool:
        """Wait for the collective for at most ``timeout_s`` seconds. Return whether it is done."""

    def wait(self) -> None:
        """Block until the result of the collective is in place.

        Raises:
            CollectiveFailed: the group has failed or was aborted.
        """


@runtime_checkable
class ReportsMissingRanks(Protocol):
    """A collective in flight that reports the ranks it waits for."""

    def missing(self) -> list[int]:
        """Return the ranks of the group that have not called this collective, or an earlier incomplete one."""


class Collectives(Protocol):
    """Interface of the collectives of one group of ranks.

    All calls are asynchronous, and every rank makes them in the same order.

    Args:
        op: SUM, MIN, MAX or PRODUCT.
    """

    rank: int
    size: int
    # Whether `allreduce` scales and divides as part of the reduction, at no extra cost, and sums float16 and bfloat16
    # in float32, so that sums cannot overflow before they are scaled. Equal on every rank.
    scales_inside: bool

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        """Reduce a tensor over all ranks in place. Every rank's tensor has the same number of elements and dtype.

        The result is multiplied by ``scale`` and then divided by ``divisor``, which are equal on every rank. Integers
        ignore both. An average is a sum with a divisor, because a multiplication by 1/n would differ in the last bit.
        """

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Overwrite a tensor in place with that of rank ``root``. Shapes and dtypes are equal on all ranks."""

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Set ``outputs[r]`` to the tensor of rank r. All tensors have the same shape and dtype."""

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        """Exchange rows along dimension 0.

        ``sent[r]`` rows of ``tensor`` are sent to rank r, and ``received[r]`` rows are received from rank r.
        """

    def barrier(self) -> Work:
        """Return a work that completes when every rank has called this method."""

    def abort(self) -> None:
        """Make all pending waits and later calls raise CollectiveFailed. Thread-safe and idempotent.

        This method never blocks.
        """

    def drain(self, timeout_s: float) -> bool:
        """Wait, after `abort`, until no collective of this group writes to any tensor.

        Call this before tensors that were in flight are written again. Returns False if a collective still writes after
        ``timeout_s`` seconds.
        """

    def close(self) -> None:
        """Free sockets and threads, after `abort`.

        This may take tens of milliseconds, so call it off the critical path.
        """


@runtime_checkable
class GathersAndScatters(Protocol):
    """A group with native collectives for models with sharded parameters.

    Each method takes lists of tensors, and launches the collectives of all tensors as one operation. Tensors of
    reductions are of floating-point types. The order of the additions and the rounding of factors depend on the
    backend, and half precision may be summed in half precision.

    In a group without these methods, an all-gather fills a list of tensors, and a reduce-scatter is an alltoall and a
    local reduction.
    """

    def allgather_into(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> Work:
        """Set each output to the concatenation of all ranks' tensors, in rank order.

        An output has ``size`` times as many elements.
        """

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        tensors: list[torch.Tensor],
        scale: float = 1.0,
        divisor: int = 1,
    ) -> Work:
        """Set each output to this rank's part of the sum of all ranks' tensors, multiplied by ``scale / divisor``.

        Each of ``tensors`` has ``size`` times as many elements as its output: the parts, in the order of the ranks.
        """

    def allreduce_scaled(
        self, tensors: list[torch.Tensor], scale: float = 1.0, divisor: int = 1
    ) -> Work:
        """Set each tensor to the sum of the ranks' tensors, multiplied by ``scale / divisor``."""


@runtime_checkable
class StreamOrdered(Protocol):
    """Collective on a GPU for which a stream can wait, so that operators can be queued without waiting on the host."""

    def follow(self, limit_s: float | None = None) -> None:
        """Make the current stream wait for the collective.

        The group fails if the collective does not end within ``limit_s`` seconds after the end of the previous
        collective. If the group's own timeout is shorter, it applies instead.

        The collective can still fail after this returns. Operators queued after it then read invalid values.
        `Runtime.settle` raises in that case, and must be called before any value is kept.

        Raises:
            CollectiveFailed: the group has already failed.
        """


@runtime_checkable
class ReducesInto(Protocol):
    """Group that can write the result of a reduction to other memory, which avoids a copy of the tensor."""

    def allreduce_into(
        self,
        result: torch.Tensor,
        tensor: torch.Tensor,
        op: Op,
        scale: float = 1.0,
        divisor: int = 1,
    ) -> Work:
        """Reduce ``tensor`` into ``result``, and leave ``tensor`` unchanged. See `Collectives.allreduce`.

        Args:
            result: receives the result. It has the shape and dtype of ``tensor``, and shares no memory with it.
            tensor: the tensor to reduce.
            op: reduction operation.
            scale: factor by which the result is multiplied.
            divisor: number by which the result is then divided.
        """


@runtime_checkable
class SumsTrees(Protocol):
    """Group that can sum values directly in other ranks' memory, in a given order."""

    def reduce_tree(
        self,
        places: torch.Tensor,
        elements: int,
        program: Sequence[tuple[int, int] | None],
        divisor: int = 1,
    ) -> Work:
        """Sum rows of all ranks' ``places`` in the order that ``program`` specifies.

        The result, rounded and then divided by ``divisor``, replaces row 0 on every rank.

        Args:
            places: 2-d tensor in memory that all ranks map. Row strides are equal on all ranks; numbers of rows may
                differ.
            elements: number of elements of each row to sum, from the start of the row.
            program: program in postfix notation. ``(rank, row)`` pushes a value, and None replaces the top two values
                by their sum.
            divisor: number by which the sum is divided.

        Raises:
            ValueError: ``places`` is not in memory that all ranks map.
        """


class Counts(NamedTuple):
    """Progress counters of one group's collectives.

    The first three fields are numbers of collectives: launched, reached by the GPU, and completed.
    """

    launched: int
    arrived: int
    done: int
    # longest time in seconds from a launch until the GPU reached the collective; 0 if shorter than the polling interval
    took_s: float
    failed: bool  # whether the device has returned an error


class DeviceCollectives(Collectives, Protocol):
    """Group of several ranks on GPUs. Calls return before their kernels have run."""

    @property
    def unsettled(self) -> bool:
        """Return whether a stream waits for a collective whose outcome is not known yet."""

    def settle(self) -> None:
        """Wait until all collectives for which streams wait have ended.

        Raises:
            CollectiveFailed: the group has failed; results of its last collectives may be invalid.
        """

    def followed_since(self) -> float | None:
        """Return the launch time of the oldest running collective, or None if no stream waits for a collective.

        The result is also None if the group has failed, because a kernel that is still running then does not wait for a
        peer. This method fails the group if the backend has detected an error: the training thread cannot check for
        errors while it waits in CUDA.
        """

    def counts(self) -> Counts:
        """Return the progress of the collectives. This method does not wait for the GPU.

        Call this from one thread at a time.
        """

    def ended(self, timeout_s: float) -> bool:
        """Return, after `abort`, whether all kernels of collectives have ended.

        This method waits up to ``timeout_s``.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """Close the group. This method waits up to ``timeout_s``, by default the timeout for connecting."""

    def freed(self, timeout_s: float) -> bool:
        """Return whether the GPU memory has been freed after `close`, possibly by another thread.

        This method waits up to ``timeout_s``.
        """


class MessageWork(Work, Protocol):
    """A message in flight."""

    @property
    def source(self) -> int:
        """Return the rank of the sender, once the message is received."""


class Messenger(Protocol):
    """A group for point-to-point messages only. Ranks and tensors are as in `Collectives`."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> MessageWork:
        """Send a tensor to one rank. Messages with the same receiver and tag, 0 to MAX_TAG, arrive in order."""

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """Receive into a tensor from rank ``source``, or from any rank if ``source`` is None.

        `MessageWork.source` returns the sender.

        Waiting for the work raises TensorMismatch if the message has another dtype or number of elements. The error
        message describes both tensors.
        """

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Block until rank 0 has received a message from each other rank.

        After a failure, the group can send no more messages.

        Raises:
            CollectiveFailed: a rank did not arrive. On rank 0, the error names the first missing rank, or all missing
                ranks with ``wait_all_ranks``.
        """
