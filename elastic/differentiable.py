"""The gradients of collectives, with Horovod's conventions: a rank's loss counts as its share of an average."""

from __future__ import annotations

from typing import Any

import torch

from elastic import submission
from elastic.collectives.interface import Op


class _Allreduce(torch.autograd.Function):
    """Gradient: the same reduction of the gradients (also for Min, Max and Product, as in Horovod)."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: Op,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = (op, prescale, postscale)
        handle = submission.start_allreduce(tensors, name, op, prescale, postscale)
        return tuple(submission.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = submission.synchronize(submission.start_allreduce(gradients, None, *ctx.how))
        return (None, None, None, None, *reduced)


class _Allgather(torch.autograd.Function):
    """Gradient: this rank's rows of the averaged gradient."""

    @staticmethod
    def forward(ctx: Any, name: str | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, starts = submission.synchronize(submission.start_allgather(tensors, name))
        ctx.own = [(start, len(tensor)) for start, tensor in zip(starts, tensors, strict=True)]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averages = submission.synchronize(submission.start_allreduce(gradients, None, Op.AVERAGE))
        own = [
            average.narrow(0, start, count)
            for average, (start, count) in zip(averages, ctx.own, strict=True)
        ]
        return (None, *own)


class _Broadcast(torch.autograd.Function):
    """Gradient: the averaged gradient on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, name: str | None, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.root = root
        result: torch.Tensor = submission.synchronize(
            submission.start_broadcast(tensor, root, name, in_place=False)
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        (average,) = submission.synchronize(submission.start_allreduce(gradients, None, Op.AVERAGE))
        return (
            None,
            None,
            average if submission.is_root(ctx.root, average.device) else torch.zeros_like(average),
        )


class _Alltoall(torch.autograd.Function):
    """Gradient: every row's gradient goes back to where the row came from; rows that were not sent get zeros."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, splits: Any, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = submission.synchronize(submission.start_alltoall(tensor, splits, name))
        ctx.received, ctx.rows = received, len(tensor)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        returned, _ = submission.synchronize(
            submission.start_alltoall(gradients[0], ctx.received, None)
        )
        missing = ctx.rows - len(returned)
        if missing:
            unsent = returned.new_zeros((missing, *returned.shape[1:]))
            returned = torch.cat([returned, unsent])
        return None, None, returned


class _Reducescatter(torch.autograd.Function):
    """Gradient: all ranks' gradients, gathered; times the number of ranks for Sum, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: Op,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.factor = prescale * postscale
        ctx.op = op
        handle = submission.start_reducescatter(tensors, name, op, prescale, postscale)
        return tuple(submission.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = ctx.factor * (
            submission.group_size(gradients[0].device) if ctx.op is Op.SUM else 1
        )
        scaled = [gradient * factor for gradient in gradients]
        gathered, _ = submission.synchronize(submission.start_allgather(scaled, None))
        return (None, None, None, None, *gathered)


# torch's stubs leave `apply` untyped.
allreduce: Any = _Allreduce.apply
allgather: Any = _Allgather.apply
broadcast: Any = _Broadcast.apply
alltoall: Any = _Alltoall.apply
reducescatter: Any = _Reducescatter.apply
