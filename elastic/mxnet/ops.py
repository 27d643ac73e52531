"""Collectives for MXNet, with Horovod's names, signatures and defaults; `elastic.api.ops` does the work.

All take dense ``mxnet.nd.NDArray`` of float16, float32, float64, (u)int8, int32 or int64. They return when the result
is there: MXNet's engine is waited for, and does nothing of ours later. None is recorded for gradients, as in Horovod.

These arguments mean the same everywhere:

    name: what the call is matched by: ranks may submit different names in different orders. Calls without a name are
        matched by their order among those of one kind.
    op: Average, Sum, Min, Max, Product or Adasum. Average if it is not given.
    average: deprecated: True means Average, False means Sum.
    priority: accepted, and without a meaning: each call is over when it returns.
    prescale_factor, postscale_factor: the array is multiplied by them before and after the reduction.
    process_set: only its ranks call, and only they take part. All ranks by default.

All raise what torch's collectives raise (see `elastic.api.ops`), and TypeError for what is no NDArray.
"""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx
import torch

from elastic.api import ops
from elastic.api.ops import Adasum, Average, Max, Min, Product, Sum, as_op
from elastic.mxnet.bridge import Array, copy_of, view, views
from elastic.negotiation.process_sets import ProcessSet, global_process_set


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Array:
    """All ranks' arrays, reduced: a new array of the same shape and dtype."""
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce(
        [tensor], None, name, priority, *factors, process_set, as_op(op, average)
    )[0]


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Array:
    """`allreduce` into the array itself, which is returned."""
    factors = (prescale_factor, postscale_factor)
    grouped_allreduce_([tensor], None, name, priority, *factors, process_set, as_op(op, average))
    return tensor


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Array]:
    """`allreduce` of several arrays at once; small ones of one dtype travel in one buffer."""
    for tensor in tensors:
        view(tensor)  # refused before anything is copied
    made = [tensor.copy() for tensor in tensors]
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce_(made, None, name, priority, *factors, process_set, as_op(op, average))


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Array]:
    """`grouped_allreduce` into the arrays themselves, which are returned."""
    reduction = as_op(op, average)
    if tensors:
        scales = (prescale_factor, postscale_factor)
        ops.grouped_allreduce_(views(tensors), None, name, reduction, *scales, process_set)
    return list(tensors)


def allgather(
    tensor: Array,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Concatenates all ranks' arrays along dimension 0, in rank order.

    Args:
        tensor: of shape ``[rows, ...]``. ``rows`` may differ between ranks.

    Returns:
        A new array of shape ``[sum of all rows, ...]`` and the same dtype.
    """
    return copy_of(ops.allgather(view(tensor), name, process_set), tensor)


def grouped_allgather(
    tensors: Sequence[Array],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """`allgather` of several arrays at once."""
    if not tensors:
        return []
    made = ops.grouped_allgather([view(tensor) for tensor in tensors], name, process_set)
    return [copy_of(each, tensor) for each, tensor in zip(made, tensors, strict=True)]


def broadcast(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Rank ``root_rank``'s array, on every rank: a new array. The root counts in the world."""
    view(tensor)
    return broadcast_(tensor.copy(), root_rank, name, priority, process_set)


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """`broadcast` into the array itself, which is returned."""
    ops.broadcast_(view(tensor, write=True), root_rank, name, process_set)
    return tensor


def alltoall(
    tensor: Array,
    splits: Array | Sequence[int] | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Sends ``splits[r]`` rows of the array to each rank r, and returns what all have sent here.

    Args:
        tensor: of shape ``[rows, ...]``.
        splits: one number for each rank; without it all get equally many rows.

    Returns:
        The received rows, in rank order; with ``splits`` also an int32 array that says how many came from each rank.
    """
    if splits is None:
        made = ops.alltoall(view(tensor), None, name, process_set)
        assert isinstance(made, torch.Tensor)
        return copy_of(made, tensor)
    numbers = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits
    counts = torch.tensor([int(each) for each in numbers], dtype=torch.int32, device="cpu")
    rows, received = ops.alltoall(view(tensor), counts, name, process_set)
    return copy_of(rows, tensor), mx.nd.array(received.tolist(), dtype="int32")


def reducescatter(
    tensor: Array,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduces an array of shape ``[rows, ...]``, and gives each rank its share of the rows: the first ranks have one
    more where they can't be dealt out evenly. ``op`` is Average or Sum.
    """
    scales = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], op, name, priority, process_set, *scales)[0]


def grouped_reducescatter(
    tensors: Sequence[Array],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """`reducescatter` of several arrays at once."""
    if not tensors:
        return []
    made = ops.grouped_reducescatter(
        [view(tensor) for tensor in tensors],
        name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return [copy_of(each, tensor) for each, tensor in zip(made, tensors, strict=True)]


__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]
