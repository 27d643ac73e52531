"""Starts collectives that move rows without reducing them: broadcast, allgather, alltoall.

Where ranks may bring different numbers of rows, they tell each other first. That small exchange blocks until every
rank has submitted the collective, and carries a digest of dtype and row shape: a mismatch raises on every rank before
any data is sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from elastic.collectives.interface import Collectives
from elastic.reductions import Started

_PAD_BYTES = (
    1 << 20
)  # up to here a padded allgather beats a broadcast per rank, however uneven the ranks


def broadcast(group: Collectives, tensor: torch.Tensor, root: int, in_place: bool) -> Started:
    """Rank ``root``'s tensor, in a new one or in place. Every rank's has one shape and dtype."""
    data = tensor.detach()
    if not in_place:
        data = data.clone(memory_format=torch.contiguous_format)
    elif not data.is_contiguous():
        data = data.contiguous()
    work = group.broadcast(data, root)

    def finish() -> torch.Tensor:
        if not in_place:
            return data
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
        return tensor

    return [work], finish


def allgather(group: Collectives, tensors: Sequence[torch.Tensor]) -> Started:
    """(For each tensor all ranks' rows in rank order; and in which row of it this rank's own start)."""
    rows = _all_rows(group, "allgather", tensors)
    started = [
        _allgather_one(group, tensor.detach().contiguous(), counts)
        for tensor, counts in zip(tensors, rows, strict=True)
    ]
    works = [work for each, _ in started for work in each]
    starts = [sum(counts[: group.rank]) for counts in rows]
    return works, lambda: ([finish() for _, finish in started], starts)


def _allgather_one(group: Collectives, tensor: torch.Tensor, rows: list[int]) -> Started:
    total, most = sum(rows), max(rows)
    result = tensor.new_empty((total, *tensor.shape[1:]))
    slices = list(torch.split(result, rows))
    if total == most * group.size:  # nobody has fewer
        return [group.allgather(slices, tensor)], lambda: result
    # From the shape and not from the rows: all ranks must come to one decision, those without rows too.
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


def alltoall(group: Collectives, tensor: torch.Tensor, splits: list[int]) -> Started:
    """The next ``splits[r]`` rows go to rank r; (rows received in rank order, int32 rows per rank)."""
    tensor = tensor.detach().contiguous()[: sum(splits)]
    digest = _digest("alltoall", [tensor])
    sent = torch.tensor([[digest, rows] for rows in splits], device=tensor.device)
    answers = torch.empty_like(sent)
    ones = [1] * group.size
    group.alltoall(answers, sent, received=ones, sent=ones).wait()
    digests, received = (list(map(int, column)) for column in answers.t())
    _compare("alltoall", digests, digest)
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = group.alltoall(output, tensor, received=received, sent=splits)
    return [work], lambda: (output, torch.tensor(received, dtype=torch.int32))


def _all_rows(group: Collectives, kind: str, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each tensor, every rank's number of rows. Raises ValueError if they can't be concatenated."""
    digest = _digest(kind, tensors)
    own = torch.tensor([digest, *map(len, tensors)], device=tensors[0].device)
    # Numbers of tensors may differ too, so the digests are compared before the rest is sent.
    first = _gathered(group, own[:2])
    _compare(kind, [each[0] for each in first], digest)
    rest = _gathered(group, own[2:]) if len(tensors) > 1 else [[] for _ in first]
    per_rank = [[each[1], *more] for each, more in zip(first, rest, strict=True)]
    return [list(counts) for counts in zip(*per_rank, strict=True)]


def _gathered(group: Collectives, numbers: torch.Tensor) -> list[list[int]]:
    outputs = [torch.empty_like(numbers) for _ in range(group.size)]
    group.allgather(outputs, numbers.clone()).wait()
    return [list(map(int, output)) for output in outputs]


def _digest(kind: str, tensors: Sequence[torch.Tensor]) -> int:
    text = ";".join(f"{kind} {tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in tensors)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _compare(kind: str, digests: list[int], own: int) -> None:
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise ValueError(
            f"{kind}: the ranks' tensors do not fit together: ranks {differing} differ from rank 0 in number of"
            " tensors, dtype, or shape beyond the first dimension"
        )
