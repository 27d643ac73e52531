"""Collectives for user code, with Horovod's names, signatures and defaults; `submission` does the work.

Calls are matched by name: ranks may submit different names in different orders, and a name has to be unique among what
is in flight. Calls without a name are matched by their order among those of one kind. What does not fit together
raises TensorMismatch on every rank. Nothing is sent before all arguments have been checked; then errors are TypeError
and ValueError. PeerLost is raised when the world breaks.

All functions take CPU or CUDA tensors, contiguous or not. Handles are integers for `poll` and `synchronize`. With a
``process_set`` only its ranks call, and only they take part.
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
    """``postscale_factor * op(prescale_factor * tensor)`` over all ranks, as a new tensor of the same shape and dtype.

    Differentiable. ``op``: Average (default), Sum, Min, Max, Product. ``average`` is deprecated.
    ``compression`` shrinks what is sent. Integers are scaled in float64 and truncated.
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
    """Starts an allreduce; `synchronize` returns the new tensor. Not differentiable, as all ``_async`` forms."""
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(
        [tensor], name, _reduction(op, average), *scales, members=members, pick=_only
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `allreduce`, into the tensor itself, which is returned. Not differentiable."""
    reduction, scales = _reduction(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    handle = start_allreduce(
        [tensor], name, reduction, *scales, members=members, in_place=True, pick=_only, soon=True
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
    """Starts an allreduce into the tensor itself; don't touch it before `synchronize`."""
    reduction, scales = _reduction(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(
        [tensor], name, reduction, *scales, members=members, in_place=True, pick=_only
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
    """`allreduce` of several tensors on one device; those of one dtype travel together. Differentiable."""
    members, reduction = resolve(process_set), _reduction(op, average)
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
    """Starts a grouped allreduce; `synchronize` returns the list of new tensors."""
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(tensors, name, _reduction(op, average), *scales, members=members)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Like `grouped_allreduce`, into the tensors themselves. Not differentiable."""
    reduction, scales = _reduction(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    handle = start_allreduce(
        tensors, name, reduction, *scales, members=members, in_place=True, soon=True
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
    """Starts a grouped allreduce into the tensors themselves."""
    reduction, scales = _reduction(op, average), (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_allreduce(tensors, name, reduction, *scales, members=members, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts a reduction of a sparse COO tensor. Call what is returned to wait for the coalesced sparse result.

    ``op``: Average or Sum. The number of entries may differ between ranks.
    """
    members, reduction = resolve(process_set), _reduction(op, None)
    if not tensor.is_sparse:
        raise ValueError("sparse_allreduce_async needs a sparse COO tensor; use allreduce_async")
    if reduction not in (Op.AVERAGE, Op.SUM):
        raise ValueError(
            f"sparse tensors can't be reduced with {reduction.name.title()}; use Average or Sum"
        )
    entries = tensor.detach().coalesce()
    if not isinstance(name, str):
        raise TypeError(f"the name of a sparse allreduce is a string, not {name!r}")
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
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """All ranks' tensors, concatenated along dimension 0 in rank order. Differentiable.

    Dimension 0 may differ between ranks; the other dimensions and the dtype may not. Any dtype.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allgather, after all ranks have come and told how many rows they bring."""
    members = resolve(process_set)
    return start_allgather([tensor], name, members=members, pick=lambda gathered: gathered[0][0])


def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of several tensors on one device. Differentiable."""
    return list(autograd.allgather(name, resolve(process_set), *tensors))


def grouped_allgather_async(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a grouped allgather; `synchronize` returns the list of new tensors."""
    members = resolve(process_set)
    return start_allgather(tensors, name, members=members, pick=lambda gathered: gathered[0])


# ---- broadcast ---------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Rank ``root_rank``'s tensor, as a new one. Same shape and dtype on all ranks; any dtype. Differentiable."""
    members = resolve(process_set)
    result: torch.Tensor = autograd.broadcast(name, members, root_rank, tensor)
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast; `synchronize` returns the new tensor."""
    members = resolve(process_set)
    return start_broadcast(tensor, root_rank, name, members=members, in_place=False)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with rank ``root_rank``'s, and returns it. Not differentiable."""
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
    """Starts a broadcast into the tensor itself; don't touch it before `synchronize`."""
    members = resolve(process_set)
    return start_broadcast(tensor, root_rank, name, members=members, in_place=True)


# ---- alltoall ----------------------------------------------------------------------------------


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends ``splits[r]`` rows to each rank r, in order, and returns the rows received, in rank order. Differentiable.

    Without ``splits`` all ranks are sent equally many. With them (int32), also returns how many rows came from each
    rank, as an int32 CPU tensor.
    """
    output, received = autograd.alltoall(name, resolve(process_set), splits, tensor)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall, after all ranks have come; `synchronize` returns (rows, rows per rank)."""
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
    """This rank's rows of the reduced tensor; the first ``rows % size`` ranks get one row more. Differentiable.

    ``op``: Average or Sum. Same shape and dtype on all ranks, at least 1 dimension.
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
    """Starts a reducescatter; `synchronize` returns this rank's rows."""
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_reducescatter(
        [tensor], name, _reduction(op, None), *scales, members=members, pick=_only
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
    """`reducescatter` of several tensors on one device. Differentiable."""
    members = resolve(process_set)
    packed = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    reduced = autograd.reducescatter(
        name, members, _reduction(op, None), *scales, *(tensor for tensor, _ in packed)
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
    """Starts a grouped reducescatter; `synchronize` returns the list of this rank's rows."""
    scales = (prescale_factor, postscale_factor)
    members = resolve(process_set)
    return start_reducescatter(tensors, name, _reduction(op, None), *scales, members=members)


# ---- waiting -----------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every rank has called it."""
    submission.barrier(resolve(process_set))


def _reduction(op: int | None, average: bool | None) -> Op:
    if average is not None:
        if op is not None:
            raise ValueError("op and average were both given; give op alone")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, 4)
        return Op.AVERAGE if average else Op.SUM
    if op is None:
        return Op.AVERAGE
    try:
        return Op(op)
    except ValueError:
        raise ValueError(f"op is {op!r}; give Average, Sum, Min, Max or Product") from None


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
