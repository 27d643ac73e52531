"""`SyncBatchNorm`: batch normalization with statistics over the batches of all ranks.

In training, each rank converts the mean and variance of its own batch to sums, and one small allreduce adds these up:
sums and sums of squares per channel in float64, and the number of values. The backward pass reduces two more sums per
channel. Because the allreduce adds sums and does not average statistics, batches may differ in size and may be empty. A
rank that called `join` contributes no values. See Ioffe and Szegedy, "Batch Normalization", ICML 2015, arXiv
1502.03167.

This module communicates only through `elastic.api.ops`. Only torch operations are used, so the layer runs on any
device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.api import ops
from elastic.negotiation.process_sets import ProcessSet, global_process_set

_HALF = (torch.float16, torch.bfloat16)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with statistics over the batches of all ranks.

    Inputs have the shape ``[batch, num_features, ...]``, as for ``torch.nn.BatchNorm1d`` to ``BatchNorm3d``.

    Arguments, parameters, buffers and ``state_dict`` are those of torch's layers, so state dicts can be exchanged with
    them. ``process_set`` selects the ranks that share their statistics. Float16 and bfloat16 inputs are normalized in
    float32.

    In training mode, every rank must call the layer and run its backward pass the same number of times and in the same
    order. If a rank omits a call, the other ranks wait for it.

    As in Horovod, the total loss is taken to be the average of the losses of all ranks. The gradient of the input is
    that of the sum of all ranks' losses, because each input affects every output through the statistics. The gradients
    of weight and bias are those of this rank's loss alone; `DistributedOptimizer` averages them like all others. With
    ``op=Average``, all parameters of the model then receive the gradient of the average loss.

    In evaluation mode, and in a world of one rank, the layer behaves like torch's layer.

    Raises:
        ValueError: the input has fewer than two dimensions or a different number of channels.
        NotInitialized: ``init()`` was not called.
        PeerLost: a worker was lost. Also raised by the backward pass.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        process_set = self.process_set if self.process_set is not None else global_process_set
        if not self.training or process_set.size() == 1:
            return super().forward(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        output, mean, variance, count = _normalized(
            input, self.weight, self.bias, self.eps, process_set
        )
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            unbiased = variance * (count / (count - 1.0).clamp(min=1.0)).to(variance.dtype)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm needs inputs of at least 2 dimensions, not {input.dim()}: pass a tensor of shape (N,"
                " C, ...)"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm was created for {self.num_features} channels, but dimension 1 of the input has"
                f" {input.shape[1]} channels: create it with the input's number of channels"
            )


class _Normalized(torch.autograd.Function):
    """Autograd function that returns the normalized input.

    It also returns the mean, the variance and the number of values per channel over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance, count = _statistics(input, process_set)
        factor, offset = (None if each is None else each.to(mean) for each in (weight, bias))
        output = functional.batch_norm(input, mean, variance, factor, offset, False, 0.0, eps)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.process_set = process_set
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        wide = mean.dtype
        others = [dim for dim in range(input.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        centered = input.to(wide) - mean.view(shape)
        gradient = gradient.to(wide)
        # Per channel, the sums of the gradients, and of the gradients times the centered values.
        sums = torch.stack([gradient.sum(others), (gradient * centered).sum(others)])
        of_weight = of_bias = of_input = None
        if ctx.needs_input_grad[1]:
            of_weight = (sums[1] * inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = sums[0].to(weight.dtype)
        if ctx.needs_input_grad[0]:
            # `_total` returns a new tensor, because `of_bias` may share the memory of this rank's sums.
            means = _total("backward", sums.double(), ctx.process_set).div_(count).to(wide)
            scale = inverse if weight is None else inverse * weight.to(wide)
            by_value = means[1] * inverse * inverse
            of_input = gradient - means[0].view(shape)
            of_input.addcmul_(centered, by_value.view(shape), value=-1.0)
            of_input = of_input.mul_(scale.view(shape)).to(input.dtype)
        return of_input, of_weight, of_bias, None, None


# torch.compile cannot compile communication and inserts a graph break here. The decorator of torch.compiler with the
# same effect is not used, because it imports the compiler in every process.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _normalized(*arguments: Any) -> tuple[torch.Tensor, ...]:
    outputs: tuple[torch.Tensor, ...] = _Normalized.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs


def _statistics(
    input: torch.Tensor, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean, the biased variance and the number of values per channel, over all ranks.

    All three have the shape ``[channels]`` and are computed in float32, or in float64 for float64 inputs. Each rank
    subtracts its own mean before it squares, and the ranks' sums are combined in float64, so the variance keeps its
    precision if the mean is much larger than the standard deviation.
    """
    wide = torch.float32 if input.dtype in _HALF else input.dtype
    others = [dim for dim in range(input.dim()) if dim != 1]
    channels = input.shape[1]
    values = input.numel() // channels
    sums = torch.zeros((3, channels), dtype=torch.float64, device=input.device)
    if values:
        variance, mean = torch.var_mean(input.detach().to(wide), others, correction=0)
        mean = mean.double()
        sums[0] = values
        sums[1] = mean * values
        sums[2] = (variance.double() + mean * mean) * values
    total = _total("forward", sums, process_set)
    count = total[0, :1].clamp(min=1.0)
    mean = total[1] / count
    variance = (total[2] / count - mean * mean).clamp(min=0.0)
    return mean.to(wide), variance.to(wide), count


def _total(direction: str, sums: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    # All layers with the same number of channels share a name: they run in the same order on every rank, and a name
    # whose shape stays the same is negotiated only once. The name contains no index of the layer, because ranks may
    # create layers in different orders.
    name = f"sync_batch_norm.{direction}.{sums.shape[1]}"
    return ops.allreduce(sums, name=name, op=ops.Sum, process_set=process_set)


__all__ = ["SyncBatchNorm"]
