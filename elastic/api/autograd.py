"""Differentiable collectives for autograd.

As in Horovod, gradients are those of the average of all ranks' losses.

The backward pass runs collectives among the same ranks and is itself differentiable. These collectives take their names
from the forward calls, so ranks may run their backward passes in different orders. Calls without a name are matched by
their order. Integer tensors have no gradient and are skipped.

The argument ``members`` contains the ranks of a process set, or is None for all ranks. Root ranks are world ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.collectives.interface import Op
from elastic.negotiation import submission

Members = tuple[int, ...] | None
Gradients = tuple[torch.Tensor | None, ...]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        members: Members,
        op: Op,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = (_backward(name), members, op, prescale, postscale)
        ctx.floating = _floating(tensors)
        handle = submission.start_allreduce(
            tensors, name, op, prescale, postscale, members=members, soon=True
        )
        return tuple(submission.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        reduced = allreduce(*ctx.how, *_chosen(gradients, ctx.floating))
        return (None, None, None, None, None, *_placed(reduced, ctx.floating))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, members: Members, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        handle = submission.start_allgather(tensors, name, members=members, soon=True)
        results, starts = submission.synchronize(handle)
        ctx.how = (_backward(name), members)
        ctx.floating = _floating(tensors)
        ctx.own = [(start, len(tensor)) for start, tensor in zip(starts, tensors, strict=True)]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        averages = _average(ctx.how, _chosen(gradients, ctx.floating))
        own = [
            average.narrow(0, *rows)
            for average, rows in zip(averages, _chosen(ctx.own, ctx.floating), strict=True)
        ]
        return (None, None, *_placed(own, ctx.floating))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, members: Members, root: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.how = (_backward(name), members)
        ctx.root = root
        handle = submission.start_broadcast(
            tensor, root, name, members=members, in_place=False, soon=True
        )
        result: torch.Tensor = submission.synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        (average,) = _average(ctx.how, gradients)
        if not submission.is_root(ctx.root, average.device, ctx.how[1]):
            # The zeros are computed from the average, so they stay in the autograd graph: in a double backward pass,
            # every rank then runs the same collectives.
            average = average.masked_fill(torch.ones_like(average, dtype=torch.bool), 0)
        return None, None, None, average


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, members: Members, splits: Any, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        handle = submission.start_alltoall(tensor, splits, name, members=members, soon=True)
        output, received = submission.synchronize(handle)
        ctx.how = (_backward(name), members, received)
        ctx.rows = len(tensor)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        returned, _ = alltoall(*ctx.how, gradients[0])
        missing = ctx.rows - len(returned)
        if missing:
            unsent = returned.new_zeros((missing, *returned.shape[1:]))
            returned = torch.cat([returned, unsent])
        return None, None, None, returned


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        members: Members,
        op: Op,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        size = submission.group_size(tensors[0].device, members) if tensors else 1
        ctx.factor = prescale * postscale * (size if op is Op.SUM else 1)
        ctx.how = (_backward(name), members)
        ctx.floating = _floating(tensors)
        handle = submission.start_reducescatter(
            tensors, name, op, prescale, postscale, members=members, soon=True
        )
        return tuple(submission.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        scaled = [gradient * ctx.factor for gradient in _chosen(gradients, ctx.floating)]
        gathered = allgather(*ctx.how, *scaled)
        return (None, None, None, None, None, *_placed(gathered, ctx.floating))


# torch's stubs leave `apply` untyped.
allreduce: Any = _Allreduce.apply
allgather: Any = _Allgather.apply
broadcast: Any = _Broadcast.apply
alltoall: Any = _Alltoall.apply
reducescatter: Any = _Reducescatter.apply


def _backward(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def _average(
    how: tuple[str | None, Members], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Average gradients over the ranks. Complex gradients are averaged as pairs of real numbers.

    Args:
        how: pair of the name of the collective (or None) and the ranks that take part (None: all ranks).
        gradients: tensors of any shapes and of a floating-point or complex dtype.

    Returns:
        New tensors of the same shapes and dtypes as ``gradients``, in the same order.
    """
    parts = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    averages = allreduce(*how, Op.AVERAGE, 1.0, 1.0, *parts)
    return [
        torch.view_as_complex(average) if each.is_complex() else average
        for average, each in zip(averages, gradients, strict=True)
    ]


def _floating(tensors: Sequence[torch.Tensor]) -> list[bool]:
    return [
        # Objects other than tensors are rejected later, when the collective is submitted.
        not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex()
        for tensor in tensors
    ]


def _chosen(items: Sequence[Any], floating: list[bool]) -> list[Any]:
    return [item for item, chosen in zip(items, floating, strict=True) if chosen]


def _placed(gradients: Sequence[torch.Tensor], floating: list[bool]) -> Gradients:
    following = iter(gradients)
    return tuple(next(following) if chosen else None for chosen in floating)
