"""Implementation of torch.distributed's collectives with the five collectives of a group.

The group's collectives take contiguous tensors. A gather becomes an alltoall in which one rank receives, or an
allgather if it is small. A reduce becomes an allreduce of a copy. Unless the group has a native reduce_scatter, a
reduce_scatter becomes an alltoall whose rows each rank sums up. As torch.distributed requires, all ranks of a group
must make the same calls in the same order, with tensors of matching shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from elastic.collectives.algorithms import sparse
from elastic.collectives.interface import Collectives, GathersAndScatters, Op, Work
from elastic.torch_backend import reductions
from elastic.torch_backend.reductions import Reduction

_FUSED_BYTES = 1 << 20  # tensors whose total size in bytes is smaller are sent as one tensor
# total bytes of all parts up to which each rank receives all parts, which takes fewer rounds
_SMALL_BYTES = 64 << 10
# Parts of at least this size are sent separately, since concatenating them would cost more than a collective.
_LARGE_BYTES = 256 << 10


class CollectiveCall:
    """Call whose collectives are in flight.

    Wait for ``works``, then run the callbacks in order to store the results.
    """

    __slots__ = ("thens", "works")

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.thens: list[Callable[[], object]] = []

    def then(self, act: Callable[[], object]) -> None:
        self.thens.append(act)

    def add(self, other: CollectiveCall) -> None:
        self.works += other.works
        self.thens += other.thens


# ---- broadcasts and gathers --------------------------------------------------------------------------------------


def broadcast(group: Collectives, tensors: Sequence[torch.Tensor], root: int) -> CollectiveCall:
    begun = CollectiveCall()
    for tensor in tensors:
        if tensor.numel():
            flat = _in_row(begun, tensor, written=group.rank != root)
            begun.works.append(group.broadcast(flat, root))
    return begun


def scatter(
    group: Collectives, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
) -> CollectiveCall:
    begun, length = CollectiveCall(), output.numel()
    if not length:
        return begun
    if group.size * output.nbytes <= _SMALL_BYTES:
        # Receivers pass their own values, because before elastic.run no rank sends, and each rank must keep its values.
        row = output.detach().reshape(-1).repeat(group.size) if inputs is None else _joined(inputs)
        mine = slice(group.rank * length, (group.rank + 1) * length)
        begun.works.append(group.broadcast(row, root))
        begun.then(lambda: output.detach().copy_(row[mine].view(output.shape)))
        return begun
    place = _in_row(begun, output, read=False)
    if output.nbytes > _LARGE_BYTES:
        for rank in range(group.size):
            if rank != root:
                part = _row(inputs[rank]) if inputs is not None else place.new_empty(0)
                into = place.view(-1) if rank == group.rank else place.new_empty(0)
                _carry(begun, group, part, into, root, rank, length)
        if inputs is not None:
            place.copy_(inputs[root].detach().view(place.shape))
        return begun
    if group.rank == root:
        assert inputs is not None
        rows = _joined(inputs)
        sent = [length] * group.size
    else:
        rows, sent = place.new_empty(0), [0] * group.size
    received = [length if rank == root else 0 for rank in range(group.size)]
    begun.works.append(group.alltoall(place.view(-1), rows, received, sent))
    return begun


def gather(
    group: Collectives, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int
) -> CollectiveCall:
    begun, length = CollectiveCall(), tensor.numel()
    if not length:
        return begun
    rows = _row(tensor)
    if group.size * tensor.nbytes <= _SMALL_BYTES:
        if outputs is None:
            outputs = list(rows.new_empty((group.size, length)))
        begun.works.append(
            group.allgather([_in_row(begun, each, read=False) for each in outputs], rows)
        )
        return begun
    if tensor.nbytes > _LARGE_BYTES:
        for rank in range(group.size):
            if rank != root:
                into = rows.new_empty(0)
                if outputs is not None:
                    into = _in_row(begun, outputs[rank], read=False).view(-1)
                part = rows if rank == group.rank else rows.new_empty(0)
                _carry(begun, group, part, into, rank, root, length)
        if outputs is not None:
            outputs[root].detach().copy_(rows.view(outputs[root].shape))
        return begun
    sent = [length if rank == root else 0 for rank in range(group.size)]
    if group.rank == root:
        assert outputs is not None
        place = rows.new_empty(group.size * length)
        received = [length] * group.size
        begun.then(lambda: _part_out(place, outputs))
    else:
        place, received = rows.new_empty(0), [0] * group.size
    begun.works.append(group.alltoall(place, rows, received, sent))
    return begun


def _carry(
    begun: CollectiveCall,
    group: Collectives,
    part: torch.Tensor,
    into: torch.Tensor,
    source: int,
    to: int,
    length: int,
) -> None:
    sent = [length if (group.rank, rank) == (source, to) else 0 for rank in range(group.size)]
    received = [length if (rank, group.rank) == (source, to) else 0 for rank in range(group.size)]
    begun.works.append(group.alltoall(into, part, received, sent))


def allgather(
    group: Collectives, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
) -> CollectiveCall:
    begun = CollectiveCall()
    if tensor.numel():
        places = [_in_row(begun, output, read=False) for output in outputs]
        begun.works.append(group.allgather(places, _row(tensor)))
    return begun


def allgather_into(
    group: Collectives, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> CollectiveCall:
    """Gather tensor ``i`` of all ranks into output ``i``, concatenated in rank order, whatever the output's shape."""
    begun = CollectiveCall()
    places, rows = [], []
    for output, tensor in zip(outputs, tensors, strict=True):
        if tensor.numel():
            places.append(_in_row(begun, output, read=False).view(-1))
            rows.append(_row(tensor))
    if rows and isinstance(group, GathersAndScatters):
        begun.works.append(group.allgather_into(places, rows))
        return begun
    for place, row in zip(places, rows, strict=True):
        begun.works.append(group.allgather(list(place.split(row.numel())), row))
    return begun


# ---- reductions --------------------------------------------------------------------------------------------------


def allreduce(
    group: Collectives, tensors: Sequence[torch.Tensor], reduction: Reduction
) -> CollectiveCall:
    """Reduce tensors over all ranks of the group, in place."""
    begun = CollectiveCall()
    if isinstance(group, GathersAndScatters) and all(_summed(each, reduction) for each in tensors):
        rows = [
            _in_row(begun, reductions.reducible(each.detach(), reduction))
            for each in tensors
            if each.numel()
        ]
        if rows:
            begun.works.append(group.allreduce_scaled(rows, *reduction.scale(group.size)))
        return begun
    if len(tensors) > 1 and _small(tensors):
        flat = torch.cat([_row(tensor) for tensor in tensors])
        begun.add(_allreduce(group, flat, reduction))
        begun.then(lambda: _part_out(flat, tensors))
        return begun
    for tensor in tensors:
        begun.add(_allreduce(group, tensor, reduction))
    return begun


def _summed(tensor: torch.Tensor, reduction: Reduction) -> bool:
    """Return whether the reduction is a sum of real or complex floats, with or without a factor."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return floats and tensor.layout is torch.strided and reduction.op is Op.SUM


def _small(tensors: Sequence[torch.Tensor]) -> bool:
    dtype = tensors[0].dtype
    return (
        all(each.dtype is dtype and each.layout is torch.strided for each in tensors)
        and sum(each.nbytes for each in tensors) <= _FUSED_BYTES
    )


def _allreduce(group: Collectives, tensor: torch.Tensor, reduction: Reduction) -> CollectiveCall:
    begun = CollectiveCall()
    if tensor.layout is not torch.strided:
        return _allreduce_sparse(group, tensor, reduction)
    if not tensor.numel():
        return begun
    tensor = reductions.reducible(tensor.detach(), reduction)
    op, size = reduction.op, group.size
    if op is None:
        mine = _row(tensor)
        parts = mine.new_empty((size, len(mine)))
        begun.works.append(group.allgather(list(parts), mine))
        begun.then(lambda: tensor.copy_(reductions.combine(parts, reduction).view(tensor.shape)))
        return begun
    if tensor.dtype is torch.bool:
        bytes_ = tensor.to(torch.uint8, memory_format=torch.contiguous_format)
        begun.works.append(group.allreduce(bytes_, reductions.of_bools(op)))
        begun.then(lambda: tensor.copy_(bytes_))
        return begun
    flat = _in_row(begun, tensor)
    begun.works.append(group.allreduce(flat, op, *reduction.scale(size)))
    if not flat.is_floating_point():
        begun.thens.insert(0, lambda: reductions.divide_integers_(flat, reduction, size))
    return begun


def _allreduce_sparse(
    group: Collectives, tensor: torch.Tensor, reduction: Reduction
) -> CollectiveCall:
    """Reduce a sparse tensor. This function blocks, since message sizes depend on the other ranks' tensors."""
    if reduction.op is not Op.SUM or tensor.layout is not torch.sparse_coo:
        raise TypeError(
            "only sparse COO tensors can be reduced, and only with SUM or AVG: convert other tensors with to_dense()"
        )
    (found,) = sparse.total(group, [tensor.detach()], *reduction.scale(group.size))
    with torch.no_grad():
        # copy into the tensor itself, since a view of it would have its own indices
        tensor.copy_(found)
    return CollectiveCall()


def reduce(
    group: Collectives, tensor: torch.Tensor, root: int, reduction: Reduction
) -> CollectiveCall:
    """Reduce tensors in place at the root. The other ranks' tensors do not change."""
    if group.rank == root:
        return _allreduce(group, tensor, reduction)
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _allreduce(group, copy, reduction)


def reduce_scatter(
    group: Collectives,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor] | torch.Tensor],
    reduction: Reduction,
) -> CollectiveCall:
    """Reduce the parts of all ranks, and scatter the results: each rank receives its own part.

    Args:
        inputs: for each output, a list with one part per rank, or one tensor with all parts concatenated in rank order.
    """
    begun, size = CollectiveCall(), group.size
    places, summed = [], []
    for output, given in zip(outputs, inputs, strict=True):
        if not output.numel():
            continue
        place = reductions.reducible(output.detach(), reduction)
        if isinstance(given, torch.Tensor):
            rows = _row(reductions.reducible(given.detach(), reduction))
        else:
            rows = _joined([reductions.reducible(each.detach(), reduction) for each in given])
        if isinstance(group, GathersAndScatters) and _summed(rows, reduction):
            places.append(_in_row(begun, place, read=False).view(-1))
            summed.append(rows)
            continue
        parts = rows.new_empty((size, place.numel()))
        each = [place.numel()] * size
        begun.works.append(group.alltoall(parts.view(-1), rows, each, each))
        begun.then(functools.partial(reductions.combine_into, place, parts, reduction))
    if summed:
        assert isinstance(group, GathersAndScatters)
        begun.works.append(group.reduce_scatter(places, summed, *reduction.scale(size)))
    return begun


# ---- all-to-all exchanges ----------------------------------------------------------------------------------------


def alltoall(
    group: Collectives, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> CollectiveCall:
    begun = CollectiveCall()
    rows = _joined(inputs)
    received = [output.numel() for output in outputs]
    sent = [each.numel() for each in inputs]
    place = rows.new_empty(sum(received))
    begun.works.append(group.alltoall(place, rows, received, sent))
    begun.then(lambda: _part_out(place, outputs))
    return begun


def alltoall_rows(
    group: Collectives,
    output: torch.Tensor,
    tensor: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
) -> CollectiveCall:
    """Exchange rows along dimension 0. Without splits, each rank receives the same number of rows."""
    begun = CollectiveCall()
    rows = tensor.detach().contiguous()
    place = _in_row(begun, output, read=False)
    received = list(received) or _shares(output, group.size, "output")
    sent = list(sent) or _shares(tensor, group.size, "input")
    begun.works.append(group.alltoall(place, rows, received, sent))
    return begun


def _shares(tensor: torch.Tensor, size: int, which: str) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows % size:
        raise ValueError(
            f"the {which} of an all_to_all has {rows} rows, which can't be divided evenly among {size} ranks: pass"
            " split sizes"
        )
    return [rows // size] * size


def barrier(group: Collectives) -> CollectiveCall:
    begun = CollectiveCall()
    begun.works.append(group.barrier())
    return begun


# ---- memory ------------------------------------------------------------------------------------------------------


def _in_row(
    begun: CollectiveCall, tensor: torch.Tensor, *, read: bool = True, written: bool = True
) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    flat = (
        tensor.contiguous()
        if read
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    )
    if written:
        begun.then(lambda: tensor.copy_(flat))
    return flat


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first, at = tensors[0].detach(), tensors[0].data_ptr()
    total = sum(each.numel() for each in tensors)
    for each in tensors:
        if not each.is_contiguous() or each.data_ptr() != at:
            return torch.cat([_row(other) for other in tensors])
        at += each.nbytes
    whole = first.untyped_storage()
    if whole.data_ptr() + whole.nbytes() < at:  # adjacent by coincidence, not parts of one storage
        return torch.cat([_row(other) for other in tensors])
    return first.as_strided((total,), (1,))


def _part_out(row: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    at = 0
    for tensor in tensors:
        count = tensor.numel()
        tensor.detach().copy_(row[at : at + count].view(tensor.shape))
        at += count
