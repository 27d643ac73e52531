"""Collectives for MXNet with Horovod's names, signatures and defaults, implemented by `elastic.api.ops`.

All functions take a dense ``mxnet.nd.NDArray`` of float16, float32, float64, (u)int8, int32 or int64. They wait for
MXNet's engine and return when the result is available. They have no gradients, as in Horovod.

These arguments are common to all functions:

    name: identifies the call, so ranks may submit their calls in different orders. Calls without a name are matched by
        their order among the calls of the same collective.
    op: Average (default), Sum, Min, Max, Product or Adasum.
    average: deprecated; True means Average, False means Sum.
    priority: ignored, since each call is complete when it returns.
    prescale_factor, postscale_factor: factors applied to the array before and after the reduction.
    process_set: the ranks that call the function (default: all ranks of the world).

All functions raise the errors of torch's collectives (see `elastic.api.ops`), and TypeError for other objects.
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
    """Reduce the arrays of all ranks. Return a new array of the same shape and dtype.

    Args:
        tensor: array of any shape, the same on all ranks.
        average, name, priority, prescale_factor, postscale_factor, process_set, op: see the module docstring.
    """
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
    """Reduce an array over all ranks in place, and return it.

    Arguments and errors are those of `allreduce`.
    """
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
    """Reduce several arrays over all ranks in one call. Return a list of new arrays.

    Small arrays of one dtype share a buffer. Arguments and errors are those of `allreduce`, with a list of arrays.
    """
    for tensor in tensors:
        view(tensor)  # Check all arrays before copying any.
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
    """Reduce several arrays over all ranks in place, and return them.

    Arguments and errors are those of `grouped_allreduce`.
    """
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
    """Concatenate all ranks' arrays along dimension 0, in rank order.

    Args:
        tensor: array of shape ``[rows, ...]``. ``rows`` may differ between ranks.

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
    """Run `allgather` on several arrays in one call, and return the list of results.

    Arguments and errors are those of `allgather`, with a list of arrays.
    """
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
    """Return a copy of rank ``root_rank``'s array on every rank.

    Args:
        tensor: array of the same shape and dtype on all ranks. Only the values on ``root_rank`` are used.
        root_rank: rank in the world, also if ``process_set`` is given.
        name, priority, process_set: see the module docstring.
    """
    view(tensor)
    return broadcast_(tensor.copy(), root_rank, name, priority, process_set)


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Overwrite an array in place with that of rank ``root_rank``, and return it.

    Arguments and errors are those of `broadcast`.
    """
    ops.broadcast_(view(tensor, write=True), root_rank, name, process_set)
    return tensor


def alltoall(
    tensor: Array,
    splits: Array | Sequence[int] | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send ``splits[r]`` rows of the array to each rank r, and return the rows received.

    Args:
        tensor: array of shape ``[rows, ...]``.
        splits: number of rows for each rank, in rank order (default: the same number for all ranks).

    Returns:
        The received rows, in rank order; with ``splits`` also an int32 array with the number of rows from each rank.
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
    """Reduce an array over all ranks, and return this rank's share of the rows.

    Args:
        tensor: array of shape ``[rows, ...]``, the same on all ranks.
        op: Average or Sum.
        name, priority, process_set, prescale_factor, postscale_factor: see the module docstring.

    Returns:
        A new array with this rank's rows. If the rows cannot be divided evenly, each of the first ranks receives one
        additional row.
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
    """Run `reducescatter` on several arrays in one call, and return the list of results.

    Arguments and errors are those of `reducescatter`, with a list of arrays.
    """
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
