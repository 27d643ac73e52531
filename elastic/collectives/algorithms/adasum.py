"""Adasum: a sum of vectors in which common components count once and orthogonal components count in full.

For two vectors a and b::

    Adasum(a, b) = (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

The Adasum of equal vectors is that vector, like an average. The Adasum of orthogonal vectors is their sum. More
vectors are combined in pairs: with 4 ranks, Adasum(Adasum(0, 1), Adasum(2, 3)).

The implementation follows algorithm 1 of Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys
2021, arXiv 2006.02924: recursive vector halving and distance doubling. At level k, two ranks that differ in bit k swap
halves of the slice that both hold, so a rank sends and computes on 1/2, 1/4, 1/8 .. of the vector. At the end, all
ranks gather the finished slices. The dot products of a slice are only partial. The ranks of a block of 2^(k+1), which
together hold whole vectors, add them up. The number of bytes sent equals that of an allreduce.

The caller decides when to reduce, and provides the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.collectives.interface import Collectives
from elastic.errors import Unsupported, UnsupportedType

# Tensors are stored in rows of this many elements, and no row contains elements of two tensors. Dot products and
# factors are then computed for all tensors at once, even if the tensors are small.
_ROW = 128
_CHUNK_ROWS = (1 << 20) // _ROW  # number of rows that are held in float64 at a time
_HALF = (torch.float16, torch.bfloat16)
# A squared norm below this limit has too little precision to divide by. Of all float32 vectors, only the zero vector is
# below it.
_NO_NORM = torch.finfo(torch.float64).tiny ** 0.5


def check(size: int) -> None:
    """Raise Unsupported (a ValueError) unless ``size``, the number of ranks, is a power of two."""
    if size < 1 or size & (size - 1):
        raise Unsupported(
            f"Adasum requires 1, 2, 4, 8, ... ranks, but there are {size}: use Average, or another number of"
            " workers"
        )


def check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedType unless the dtypes of all tensors are floating-point types."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise UnsupportedType(
                f"Adasum can't reduce a tensor of {tensor.dtype}: convert the tensor to floating point, or use"
                " Sum"
            )


def reduce_(group: Collectives, tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by the Adasum of all ranks' tensors at its position. This function blocks.

    Each tensor has its own dot products, summed in float64. Half precision is computed in float32 and rounded once, at
    the end. The results are bitwise equal on all ranks. A zero vector does not change the result: Adasum(0, b) = b.

    Args:
        group: group of the ranks that take part.
        tensors: contiguous tensors on the group's device, of any shape, of dtype float16, bfloat16, float32 or float64.
            Number, shapes and dtypes are the same on every rank.

    Raises:
        Unsupported: the number of ranks is not a power of two. Raised before any tensor is sent.
        UnsupportedType: a dtype is unsupported. Raised before any tensor is sent.
        CollectiveFailed: a rank was lost.
    """
    check(group.size)
    check_tensors(tensors)
    if group.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach().view(-1))
    for vectors in by_dtype.values():
        _reduce_alike(group, vectors)


def _reduce_alike(group: Collectives, vectors: list[torch.Tensor]) -> None:
    rows, owners, views = _laid_out(vectors, group.size)
    torch._foreach_copy_(views, vectors)
    start, mine = 0, rows
    distance = 1
    while distance < group.size:
        half = len(mine) // 2
        is_left = not group.rank & distance
        kept, given = (mine[:half], mine[half:]) if is_left else (mine[half:], mine[:half])
        start += 0 if is_left else half
        theirs = _swapped(group, given, group.rank ^ distance)
        left, right = (kept, theirs) if is_left else (theirs, kept)
        mine = _combined(
            group, _wide(left), _wide(right), owners[start : start + half], len(vectors), distance
        )
        distance *= 2
    # Rounded to the tensors' dtype before the transfer, so that all ranks receive the same bits.
    share = mine.to(rows.dtype)
    outputs = [
        rows[place : place + len(share)]
        for place in (slice_start(rank, group.size, len(rows)) for rank in range(group.size))
    ]
    group.allgather(outputs, share).wait()
    torch._foreach_copy_(vectors, views)


def slice_start(rank: int, size: int, length: int) -> int:
    """Return the start of the slice that ``rank`` holds after all halvings of ``length``, a multiple of ``size``."""
    start, distance = 0, 1
    while distance < size:
        length //= 2
        start += length if rank & distance else 0
        distance *= 2
    return start


def _laid_out(
    vectors: list[torch.Tensor], size: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    counts = [-(-vector.numel() // _ROW) for vector in vectors]
    total = max(1, -(-sum(counts) // size)) * size
    rows = vectors[0].new_zeros((total, _ROW))
    counts[-1] += total - sum(counts)
    numbers = torch.arange(len(vectors), dtype=torch.int64, device="cpu")
    repeats = torch.tensor(counts, dtype=torch.int64, device="cpu")
    owners = torch.repeat_interleave(numbers, repeats)
    views, begin = [], 0
    for vector, count in zip(vectors, counts, strict=True):
        views.append(rows.view(-1)[begin : begin + vector.numel()])
        begin += count * _ROW
    return rows, owners, views


def _swapped(group: Collectives, rows: torch.Tensor, partner: int) -> torch.Tensor:
    theirs = torch.empty_like(rows)
    counts = [len(rows) if rank == partner else 0 for rank in range(group.size)]
    group.alltoall(theirs, rows, received=counts, sent=counts).wait()
    return theirs


def _combined(
    group: Collectives,
    left: torch.Tensor,
    right: torch.Tensor,
    owners: torch.Tensor,
    vectors: int,
    distance: int,
) -> torch.Tensor:
    dots = _dots(left, right, owners, vectors)
    first = group.rank // (2 * distance) * 2 * distance
    block = range(first, first + 2 * distance)
    both, left_norm, right_norm = _added_up(group, dots.to(left.device), block)
    on_device = owners.to(left.device)
    left.mul_(_factor(both, left_norm).to(left)[on_device].unsqueeze(1))
    right.mul_(_factor(both, right_norm).to(right)[on_device].unsqueeze(1))
    return left.add_(right)


def _dots(
    left: torch.Tensor, right: torch.Tensor, owners: torch.Tensor, vectors: int
) -> torch.Tensor:
    by_row = torch.empty((3, len(left)), dtype=torch.float64, device=left.device)
    for begin in range(0, len(left), _CHUNK_ROWS):
        chunk = slice(begin, begin + _CHUNK_ROWS)
        a, b = left[chunk].double(), right[chunk].double()
        for dots, pair in zip(by_row, ((a, b), (a, a), (b, b)), strict=True):
            dots[chunk] = torch.linalg.vecdot(*pair)
    # Add the dot products on the CPU, where the order of additions is fixed.
    return torch.stack([torch.bincount(owners, dots, vectors) for dots in by_row.cpu()])


def _added_up(group: Collectives, dots: torch.Tensor, block: range) -> torch.Tensor:
    sent = dots.unsqueeze(0).repeat(len(block), 1, 1)
    received = torch.empty_like(sent)
    counts = [1 if rank in block else 0 for rank in range(group.size)]
    group.alltoall(received, sent, received=counts, sent=counts).wait()
    return received.cpu().sum(0)


def _factor(both: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return torch.where(norm < _NO_NORM, 1.0, 1.0 - both / (2.0 * norm))


def _wide(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.float32) if rows.dtype in _HALF else rows
