"""Collectives for user code, with Horovod's names, signatures and defaults.

All functions accept CPU and CUDA tensors, contiguous or not. Reductions accept uint8, int8, int16, int32, int64,
float16, bfloat16, float32 and float64. All other collectives accept every dtype. Shapes and dtypes are the same on all
ranks, unless the description of a function states otherwise.

Common arguments:

    name: identifies the call, so ranks may submit their calls in different orders. A name must be unique among the
        calls in flight. Calls without a name are matched by their order among the calls of the same collective.
    op: `Average` (default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
    average: deprecated; True is ``op=Average``, False is ``op=Sum``.
    prescale_factor, postscale_factor: factors applied to the tensor before and after the reduction; Average and Sum
        only. Integers are scaled in float64 and truncated.
    compression: `Compression.none` (default), `.fp16` or `.bf16`, or a class with the methods ``compress`` and
        ``decompress``.
    process_set: the ranks that call the function (default: all ranks of the world).

Forms of a collective: ``X`` waits for the result and is differentiable. ``X_`` writes the result into its argument.
``X_async`` returns a handle, an integer for `poll` and `synchronize`. ``grouped_X`` accepts several tensors on one
device and processes all of them or none.

Before any tensor is sent, all functions raise TypeError or ValueError for invalid arguments, `UnsupportedType` (a
subclass of both) for a dtype that cannot be reduced, and `NotInitialized` before ``init()``. The call, or `synchronize`
for an ``_async`` form, raises `TensorMismatch` on every rank if the ranks pass mismatched tensors, and `PeerLost` if a
worker was lost, which ``elastic.run`` handles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.api import autograd
from elastic.api.compression import Compression
from elastic.collectives.algorithms import reductions
from elastic.collectives.interface import Op
from elastic.negotiation import submission
from elastic.negotiation.process_sets import ProcessSet, global_process_set, resolve
from elastic.negotiation.submission import (
    Tensors,
    group_size,
    poll,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
    synchronize,
)

Average = Op.AVERAGE
Sum = Op.SUM
Adasum = Op.ADASUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT

Compressor = Any  # a class with static compress() and decompress(); see elastic.api.compression


# ---- allreduce ---------------------------------------------------------------------------------


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks. Differentiable.

    Args:
        tensor: tensor of any shape and a reducible dtype.
        average, name, compression, op, prescale_factor, postscale_factor, process_set: see the module docstring.

    Returns:
        ``postscale_factor * op(prescale_factor * tensor)``: a new tensor of the same shape and dtype.

    Raises:
        UnsupportedType, ValueError, TensorMismatch, PeerLost: see the module docstring.

    Example::

        loss = hvd.allreduce(loss.detach(), name="loss")  # the mean over all ranks
    """
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce`. The result is not differentiable, like all ``_async`` forms.

    Arguments and errors are those of `allreduce`.

    Returns:
        A handle for `synchronize`, which waits and returns the new tensor.

    Example::

        handle = hvd.allreduce_async(tensor, name="norm", op=hvd.Sum)
        ...  # other computation
        total = hvd.synchronize(handle)
    """
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce([tensor], name, as_op(op, average), *scales, members=members, pick=_only)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place over all ranks, and return it. The result is not differentiable.

    Arguments and errors are those of `allreduce`.
    """
    reduction, scales = as_op(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    handle = start_allreduce(
        [tensor], name, reduction, *scales, members=members, into=[tensor], pick=_only, soon=True
    )
    result: torch.Tensor = synchronize(handle)
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an in-place `allreduce`, and return a handle.

    Do not access the tensor before `synchronize`, which returns it.

    Arguments and errors are those of `allreduce`.
    """
    reduction, scales = as_op(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(
        [tensor], name, reduction, *scales, members=members, into=[tensor], pick=_only
    )


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks. Small tensors of one dtype are packed into one buffer. Differentiable.

    Args:
        tensors: a list of tensors on one device, of any shapes and of reducible dtypes.
        average, name, compression, op, prescale_factor, postscale_factor, process_set: see the module docstring.

    Returns:
        A list of new tensors, in the same order.

    Raises:
        UnsupportedType, ValueError, TensorMismatch, PeerLost: see the module docstring.
    """
    members, reduction = resolve(process_set), as_op(op, average)
    packed = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    reduced = autograd.allreduce(
        name, members, reduction, *scales, *(tensor for tensor, _ in packed)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce`, and return a handle. `synchronize` returns the list of new tensors.

    Arguments and errors are those of `grouped_allreduce`.
    """
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(tensors, name, as_op(op, average), *scales, members=members)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place over all ranks, and return them. The result is not differentiable.

    Arguments and errors are those of `grouped_allreduce`.
    """
    reduction, scales = as_op(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    handle = start_allreduce(
        tensors, name, reduction, *scales, members=members, into=tensors, soon=True
    )
    result: list[torch.Tensor] = synchronize(handle)
    return result


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an in-place `grouped_allreduce`, and return a handle.

    Do not access the tensors before `synchronize`, which returns them.

    Arguments and errors are those of `grouped_allreduce`.
    """
    reduction, scales = as_op(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(tensors, name, reduction, *scales, members=members, into=tensors)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start a reduction of a sparse tensor: gather the entries of all ranks and sum them.

    Args:
        tensor: sparse COO, of the same shape and dtype on all ranks. The number of entries may differ.
        name: name of the call. Required.
        op: Average or Sum.
        process_set: see the module docstring.

    Returns:
        A function that waits and returns the coalesced sparse tensor.

    Raises:
        ValueError: the tensor is dense, or ``op`` is neither Average nor Sum.
        TypeError, PeerLost: see the module docstring.
    """
    members, reduction = resolve(process_set), as_op(op, None)
    if not tensor.is_sparse:
        raise ValueError(
            "sparse_allreduce_async got a dense tensor: pass a sparse COO tensor, or use allreduce_async"
        )
    if reduction not in (Op.AVERAGE, Op.SUM):
        raise ValueError(
            f"sparse tensors can't be reduced with {reduction.name.title()}: use Average or Sum"
        )
    entries = tensor.detach().coalesce()
    if not isinstance(name, str):
        raise TypeError(f"the name of a sparse allreduce is {name!r}: pass a string")
    indices = allgather_async(entries.indices().t(), f"{name}.indices", process_set)
    values = allgather_async(entries.values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        all_indices, all_values = synchronize(indices).t(), synchronize(values)
        total = torch.sparse_coo_tensor(all_indices, all_values, entries.shape).coalesce()
        if reduction is Op.AVERAGE:
            reductions.divide_(total._values(), group_size(total.device, members), 1.0)
        return total

    return result


# ---- allgather ---------------------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0, in rank order. Differentiable.

    Args:
        tensor: tensor of shape ``[rows, ...]`` and any dtype. ``rows`` may differ between ranks.
        name, process_set: see the module docstring.

    Returns:
        A new tensor of shape ``[sum of all rows, ...]`` and the same dtype.

    Raises:
        TensorMismatch: dtypes, or dimensions other than the first, differ between ranks. Raised on every rank.
        PeerLost: see the module docstring.

    Example::

        predictions = hvd.allgather(predictions)  # [samples of this rank, classes] -> [samples of all, classes]
    """
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `allgather`, and return a handle. `synchronize` returns the new tensor.

    Arguments and errors are those of `allgather`.
    """
    members = resolve(process_set)
    return start_allgather([tensor], name, members=members, pick=lambda gathered: gathered[0][0])


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Run `allgather` on several tensors on one device together. Return the list of results. Differentiable.

    Arguments and errors are those of `allgather`.
    """
    return list(autograd.allgather(name, resolve(process_set), *tensors))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather`, and return a handle. `synchronize` returns the list of new tensors.

    Arguments and errors are those of `allgather`.
    """
    members = resolve(process_set)
    return start_allgather(tensors, name, members=members, pick=lambda gathered: gathered[0])


# ---- broadcast ---------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Broadcast a tensor from one rank to all. Differentiable.

    Args:
        tensor: tensor of any dtype, with the same shape and dtype on all ranks. Its values are used on ``root_rank``
            only.
        root_rank: rank in the world, also if ``process_set`` is given.
        name, process_set: see the module docstring.

    Returns:
        A new tensor with the values of ``root_rank``, and the shape and dtype of ``tensor``.

    Raises:
        ValueError: ``root_rank`` does not exist, or is not in the process set.
        TensorMismatch, PeerLost: see the module docstring.

    Example::

        seed = hvd.broadcast(torch.tensor(seed), root_rank=0, name="seed")
    """
    members = resolve(process_set)
    result: torch.Tensor = autograd.broadcast(name, members, root_rank, tensor)
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast`, and return a handle. `synchronize` returns the new tensor.

    Arguments and errors are those of `broadcast`.
    """
    members = resolve(process_set)
    return start_broadcast(tensor, root_rank, name, members=members, in_place=False)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite a tensor in place with that of rank ``root_rank``, and return it. The result is not differentiable.

    Arguments and errors are those of `broadcast`.
    """
    members = resolve(process_set)
    handle = start_broadcast(tensor, root_rank, name, members=members, in_place=True, soon=True)
    result: torch.Tensor = synchronize(handle)
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an in-place `broadcast`, and return a handle.

    Do not access the tensor before `synchronize`, which returns it.

    Arguments and errors are those of `broadcast`.
    """
    members = resolve(process_set)
    return start_broadcast(tensor, root_rank, name, members=members, in_place=True)


# ---- alltoall ----------------------------------------------------------------------------------


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a range of the tensor's rows to each rank, and receive rows from each rank. Differentiable.

    Args:
        tensor: tensor of shape ``[rows, ...]`` and any dtype. ``rows`` may differ between ranks.
        splits: the number of rows for each rank, in rank order: int32, of shape ``[size]``. Default: the same
            number for all ranks.
        name, process_set: see the module docstring.

    Returns:
        The rows received, in rank order: a tensor of shape ``[rows received, ...]``. If ``splits`` were given, also the
        number of rows from each rank: an int32 tensor on the CPU, of shape ``[size]``.

    Raises:
        ValueError: ``splits`` does not have one entry per rank, has a negative entry, or has a sum above the number of
            rows.
        TensorMismatch, PeerLost: see the module docstring.

    Example::

        mine, counts = hvd.alltoall(tokens, splits=torch.tensor([2, 0, 5], dtype=torch.int32))
    """
    output, received = autograd.alltoall(name, resolve(process_set), splits, tensor)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall`, and return a handle.

    `synchronize` returns the rows received, and the number of rows from each rank.

    Arguments and errors are those of `alltoall`.
    """
    return start_alltoall(tensor, splits, name, members=resolve(process_set))


# ---- reducescatter -----------------------------------------------------------------------------


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and give each rank a part of the result's rows. Differentiable.

    Args:
        tensor: tensor of shape ``[rows, ...]`` and a reducible dtype, the same on all ranks.
        op: Average or Sum.
        name, compression, process_set, prescale_factor, postscale_factor: see the module docstring.

    Returns:
        This rank's rows of the result, with the dtype of ``tensor``: ``rows // size`` rows, and one more on each of the
        first ``rows % size`` ranks.

    Raises:
        Unsupported: (a ValueError) ``op`` is neither Average nor Sum.
        ValueError: ``tensor`` has no dimensions.
        UnsupportedType, TensorMismatch, PeerLost: see the module docstring.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter`, and return a handle. `synchronize` returns this rank's rows of the result.

    Arguments and errors are those of `reducescatter`.
    """
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_reducescatter(
        [tensor], name, as_op(op, None), *scales, members=members, pick=_only
    )


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run `reducescatter` on several tensors on one device together. Return the list of results. Differentiable.

    Arguments and errors are those of `reducescatter`.
    """
    members = resolve(process_set)
    packed = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    reduced = autograd.reducescatter(
        name, members, as_op(op, None), *scales, *(tensor for tensor, _ in packed)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter`, and return a handle. `synchronize` returns the list of this rank's rows.

    Arguments and errors are those of `reducescatter`.
    """
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_reducescatter(tensors, name, as_op(op, None), *scales, members=members)


# ---- waiting -----------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of ``process_set`` has called `barrier`.

    Raises:
        PeerLost: a worker was lost before all ranks had called `barrier`.
    """
    submission.barrier(resolve(process_set))


def as_op(op: int | None, average: bool | None) -> Op:
    """Return the reduction that ``op`` or the deprecated ``average`` selects.

    Raises:
        ValueError: both are given, or ``op`` is not a reduction.
    """
    if average is not None:
        if op is not None:
            raise ValueError(f"op={op} and average={average} were both given: pass only op")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, 4)
        return Op.AVERAGE if average else Op.SUM
    if op is None:
        return Op.AVERAGE
    try:
        return Op(op)
    except ValueError:
        raise ValueError(f"op is {op!r}: pass Average, Sum, Min, Max or Product") from None


def _only(results: list[torch.Tensor]) -> torch.Tensor:
    (result,) = results
    return result


__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
