"""Collectives that move rows without reducing them: broadcast, allgather, alltoall.

The number of rows of each rank is known from the negotiation of the collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from elastic.collectives.algorithms.reductions import Started
from elastic.collectives.interface import Collectives

# Up to this size in bytes, a padded allgather is faster than one broadcast per rank, even if ranks have very different
# numbers of rows.
_PAD_BYTES = 1 << 20


def broadcast(group: Collectives, tensor: torch.Tensor, root: int, in_place: bool) -> Started:
    """Broadcast the tensor of rank ``root``, to a new tensor or in place. Shapes and dtypes are equal on all ranks."""
    data = _as_stored(tensor)
    if not in_place:
        data = data.clone(memory_format=torch.contiguous_format)
    work = group.broadcast(data, root)

    def finish() -> torch.Tensor:
        if not in_place:
            return data
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
        return tensor

    return [work], finish


def allgather(
    group: Collectives, tensors: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]
) -> Started:
    """Gather rows of several tensors on all ranks.

    Args:
        group: group of the ranks that take part.
        tensors: this rank's rows of each tensor.
        rows: ``rows[r][i]`` is the number of rows of tensor i on rank r.

    Returns:
        For each tensor, the rows of all ranks in rank order, and the index of this rank's first row in it.
    """
    counts = [list(each) for each in zip(*rows, strict=True)]
    started = [
        _allgather_one(group, _as_stored(tensor), each)
        for tensor, each in zip(tensors, counts, strict=True)
    ]
    works = [work for each, _ in started for work in each]
    starts = [sum(each[: group.rank]) for each in counts]
    return works, lambda: ([finish() for _, finish in started], starts)


def _allgather_one(group: Collectives, tensor: torch.Tensor, rows: list[int]) -> Started:
    total, most = sum(rows), max(rows)
    result = tensor.new_empty((total, *tensor.shape[1:]))
    slices = list(torch.split(result, rows))
    if total == most * group.size:  # All ranks have the same number of rows.
        return [group.allgather(slices, tensor)], lambda: result
    # The decision depends on the shape and not on this rank's rows, because all ranks must make the same decision, even
    # those without rows.
    padded_bytes = most * group.size * math.prod(tensor.shape[1:]) * tensor.element_size()
    if most * group.size <= 2 * total or padded_bytes <= _PAD_BYTES:
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        work = group.allgather(parts, padded)

        def finish() -> torch.Tensor:
            for part, place in zip(parts, slices, strict=True):
                place.copy_(part[: len(place)])
            return result

        return [work], finish
    slices[group.rank].copy_(tensor)
    works = [group.broadcast(each, rank) for rank, each in enumerate(slices) if len(each)]
    return works, lambda: result


def alltoall(group: Collectives, tensor: torch.Tensor, splits: Sequence[Sequence[int]]) -> Started:
    """Exchange rows between all ranks. ``splits[r]`` lists the numbers of rows that rank r sends to each rank.

    Returns:
        The received rows in rank order, and the number of rows by rank as an int32 tensor.
    """
    sent = list(splits[group.rank])
    received = [each[group.rank] for each in splits]
    tensor = _as_stored(tensor)[: sum(sent)]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = group.alltoall(output, tensor, received=received, sent=sent)
    return [work], lambda: (output, torch.tensor(received, dtype=torch.int32, device="cpu"))


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
