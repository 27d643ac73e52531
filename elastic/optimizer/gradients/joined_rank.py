"""Participation of a joined rank in the other ranks' steps: it contributes zeros, and its state does not change.

This module also contains the exchanges with which ranks agree on a plan, because joined and other ranks must make
matching calls. `plan_agreement` interprets their results. `gradient_reducer` and `elastic.optimizer.join` decide when
to call them.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import torch

from elastic.collectives import own_gpu
from elastic.collectives.algorithms import sparse as sparse_gradients
from elastic.collectives.interface import Collectives, Op, Work
from elastic.context import Context
from elastic.errors import StateMismatch
from elastic.optimizer.gradients import plan_agreement
from elastic.optimizer.gradients.flat_buckets import zeros
from elastic.optimizer.gradients.plan_agreement import (
    AgreedPlan,
    BucketSpec,
    Plans,
    PlanVerdict,
    Sparse,
    StepFlag,
    StepPlan,
)

# reductions that are supported for sparse gradients, which are gathered instead of reduced
GATHERED = (Op.SUM,)
CPU = torch.device("cpu")
AT_ONCE = 2  # maximum number of zero buffers in flight; more would only use more memory

Members = tuple[int, ...] | None


# ---- agreement on a plan ---------------------------------------------------------------------------------------------


def channel_device(known: Plans, device: torch.device) -> torch.device:
    """Return the device on which the next agreement takes place.

    The first agreement uses ``device`` and the gradients' group. Later agreements use the CPU and a separate group: on
    a GPU, every communicator takes memory, and all ranks must launch on their communicators in the same order.
    """
    return CPU if known.agreed else device


def compare(group: Collectives, device: torch.device, vector: list[int]) -> PlanVerdict:
    """Reduce the ranks' proposals to a verdict.

    Like all exchanges in this module, this raises CollectiveFailed if a rank is lost.

    Args:
        group: group of the ranks that compare.
        device: device of the group.
        vector: result of `plan_agreement.vector`.
    """
    numbers, work = propose(group, device, vector)
    work.wait()
    return plan_agreement.verdict(numbers.tolist())


def propose(
    group: Collectives, device: torch.device, vector: list[int]
) -> tuple[torch.Tensor, Work]:
    numbers = torch.tensor(vector, dtype=torch.int64, device=device)
    return numbers, group.allreduce(numbers, Op.MAX)


def share_order(
    group: Collectives,
    device: torch.device,
    source: int | None,
    own: Sequence[int] | None,
    parameters: int,
) -> tuple[int, ...]:
    """Broadcast the order of the gradients from rank ``source`` to all ranks.

    Args:
        group: group of the ranks that compare.
        device: device of the group.
        source: rank that sends its order, or None.
        own: order on this rank, or None if it has joined.
    """
    assert source is not None
    if not parameters:
        return ()
    order = torch.zeros(parameters, dtype=torch.int32, device="cpu")
    if group.rank == source:
        assert own is not None
        order = torch.tensor(own, dtype=torch.int32, device="cpu")
    order = order.to(device)
    group.broadcast(order, source).wait()
    return tuple(order.tolist())


def compare_trained(
    group: Collectives, device: torch.device, own: Sequence[int]
) -> tuple[int, ...]:
    """Return, for each parameter, 1 if any rank trains it, else 0."""
    trained = torch.tensor(own, dtype=torch.int32, device=device)
    group.allreduce(trained, Op.MAX).wait()
    return tuple(trained.tolist())


def compare_sparse(
    group: Collectives, device: torch.device, found: Mapping[int, int], parameters: int
) -> dict[int, int]:
    """Return the number of sparse dimensions of each gradient that is sparse on any rank."""
    dims = torch.zeros(parameters, dtype=torch.int64, device="cpu")
    for number, sparse_dims in found.items():
        dims[number] = sparse_dims
    dims = dims.to(device)
    group.allreduce(dims, Op.MAX).wait()
    return {number: dim for number, dim in enumerate(dims.tolist()) if dim}


def share_bytes(group: Collectives, device: torch.device, root: int, data: bytes = b"") -> bytes:
    """Broadcast bytes from rank ``root`` to all ranks."""
    mine = group.rank == root
    length = torch.tensor([len(data) if mine else 0], dtype=torch.int64, device=device)
    group.broadcast(length, root).wait()
    if not int(length):
        return b""
    if mine:
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    group.broadcast(text, root).wait()
    return data if mine else bytes(text.tolist())


def send_layout(
    group: Collectives, device: torch.device, source: int | None, layout: StepPlan | None
) -> None:
    """Send a plan from rank ``source`` to all joined ranks.

    Args:
        group: group of the ranks that compare.
        device: device of the group.
        source: rank that sends the plan.
        layout: the plan, or None if this rank has no plan.
    """
    assert source is not None
    share_bytes(group, device, source, b"" if layout is None else layout.encode())


def receive_layout(group: Collectives, device: torch.device, source: int) -> StepPlan:
    """Receive the plan that `send_layout` sends.

    Raises:
        StateMismatch: the sender has no plan.
    """
    data = share_bytes(group, device, source)
    if not data:
        raise StateMismatch(
            "the active ranks disagree about how to reduce an optimizer's gradients: pass DistributedOptimizer the"
            " same parameters and options on every rank"
        )
    return StepPlan.decode(data)


def end_plan(rt: Context, agreed: AgreedPlan, members: Members) -> None:
    """Take part in the last step with this plan. This rank contributes zeros."""
    JoinedRank(rt, agreed, members, StepFlag.CHANGE).take()


def _marked(group: Collectives, buffer: torch.Tensor, layout: StepPlan, mark: StepFlag) -> Work:
    buffer[-1] = plan_agreement.mark_value(Op(layout.op), mark)
    return _reduced(group, buffer, layout)


def _reduced(group: Collectives, buffer: torch.Tensor, layout: StepPlan) -> Work:
    scale, divisor = (layout.scale, layout.divisor) if group.scales_inside else (1.0, 1)
    return group.allreduce(buffer, Op(layout.op), scale, divisor)


# ---- the steps of a joined rank --------------------------------------------------------------------------------------


class JoinedRank:
    """Participation of a joined rank in the steps of one plan.

    When other ranks take a step, the pending reduction of the plan's first buffer completes.
    """

    def __init__(
        self, rt: Context, agreed: AgreedPlan, members: Members, mark: StepFlag = StepFlag.JOINED
    ) -> None:
        self.agreed = agreed
        self.over = False  # whether all ranks have joined
        self.ended = False  # whether the other ranks have replaced the plan
        self._rt = rt
        self._members = members
        self._layout = agreed.layout
        self._op = Op(agreed.layout.op)
        self._first, *self._rest = agreed.layout.wires
        # Allocate the buffer before any collective is in flight: on a GPU, an allocation may block while a collective
        # waits.
        self._buffer = _zeros(self._first)
        self._spare = _buffers(self._rest)
        self._work = self._wait_again(mark)

    def done(self) -> bool:
        """Return whether `take` would return without waiting for the first buffer."""
        return not self.over and not self.ended and self._work.done()

    def take(self) -> StepFlag:
        """Take part in the next step until the step is complete, and return its flag. This method blocks.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        self._work.wait()
        mark = plan_agreement.read_mark(self._op, float(self._buffer[-1]))
        match mark:
            case StepFlag.STEP:
                first = self._rt.first_not_finite
                if first is not None and self._members is None:
                    first.missed()
                self._follow()
                self._work = self._wait_again()
            case StepFlag.JOINED:
                self.over = True
            case StepFlag.CHANGE:
                self._follow()
                self.ended = True
        return mark

    def _wait_again(self, mark: StepFlag = StepFlag.JOINED) -> Work:
        self._buffer.zero_()
        group = self._rt.group(self.agreed.purpose, torch.device(self._first.device), self._members)
        return _marked(group, self._buffer, self._layout, mark)

    def _follow(self) -> None:
        under_way: collections.deque[tuple[torch.Tensor, Work, str]] = collections.deque()
        for wire in self._rest:
            if len(under_way) == AT_ONCE:
                self._end(under_way.popleft())
            buffer = self._spare[wire.dtype + wire.device].pop()
            nothing = buffer[: wire.elements].zero_()
            group = self._rt.group(self.agreed.purpose, torch.device(wire.device), self._members)
            work = _reduced(group, nothing, self._layout)
            under_way.append((buffer, work, wire.dtype + wire.device))
        while under_way:
            self._end(under_way.popleft())
        by_device: dict[str, list[Sparse]] = {}
        for sparse in self._layout.sparse:
            by_device.setdefault(sparse.device, []).append(sparse)
        for device, gathered in by_device.items():
            group = self._rt.group(self.agreed.purpose, torch.device(device), self._members)
            sparse_gradients.total(group, [_no_entries(each) for each in gathered])

    def _end(self, sent: tuple[torch.Tensor, Work, str]) -> None:
        buffer, work, kind = sent
        work.wait()
        self._spare[kind].append(buffer)


def _zeros(wire: BucketSpec) -> torch.Tensor:
    return zeros(wire.elements, getattr(torch, wire.dtype), own_gpu.of(wire.device))


def _buffers(wires: list[BucketSpec]) -> dict[str, list[torch.Tensor]]:
    largest: dict[str, BucketSpec] = {}
    for wire in wires:
        kind = wire.dtype + wire.device
        if kind not in largest or wire.elements > largest[kind].elements:
            largest[kind] = wire
    return {kind: [_zeros(wire) for _ in range(AT_ONCE)] for kind, wire in largest.items()}


def _no_entries(sparse: Sparse) -> torch.Tensor:
    like = torch.empty(1, dtype=getattr(torch, sparse.dtype), device=own_gpu.of(sparse.device))
    return sparse_gradients.empty(like.expand(sparse.shape), sparse.dims)
