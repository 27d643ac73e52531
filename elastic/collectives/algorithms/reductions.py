"""Reductions over one group of ranks, with scaling, precision rules, and packing of small tensors.

Each function that starts a reduction returns the works to wait for and a function that produces the result. The
function checks its arguments before it sends a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.collectives.algorithms import adasum
from elastic.collectives.dtypes_and_ops import DTYPES, rescale_
from elastic.collectives.interface import ALONE_BYTES, Collectives, Op, ReducesInto, Work
from elastic.errors import UnsupportedType

Started = tuple[list[Work], Callable[[], Any]]
Into = Sequence[torch.Tensor | None]  # destinations of results; see `allreduce`

_HALF = (torch.float16, torch.bfloat16)
# dtypes in which the sum can overflow even if the average does not
_SMALL = (torch.uint8, torch.int8, torch.int16)


def check(kind: str, tensors: Sequence[torch.Tensor], op: Op, scaled: bool) -> None:
    """Check the arguments of a reduction.

    Raises:
        UnsupportedType: a dtype cannot be reduced.
        ValueError: a tensor is sparse, or the operation cannot be scaled.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise UnsupportedType(
                f"{kind} can't reduce a tensor of {tensor.dtype}: convert bool tensors with"
                " tensor.to(torch.uint8), and complex tensors with torch.view_as_real(tensor)"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{kind} does not support sparse tensors: use sparse_allreduce_async")
    if op is Op.ADASUM:
        adasum.check_tensors(tensors)
    if scaled and op not in (Op.AVERAGE, Op.SUM):
        raise ValueError(
            f"prescale_factor and postscale_factor are not supported with {op.name.title()}: leave them at 1.0"
        )


def allreduce(
    group: Collectives,
    tensors: Sequence[torch.Tensor],
    op: Op,
    prescale: float,
    postscale: float,
    into: Into,
) -> Started:
    """Compute ``postscale * reduce(prescale * tensor)`` of each tensor. Small tensors of one dtype share a buffer.

    Args:
        into: the destination of each result: the tensor itself; other memory of its shape and dtype, contiguous and not
            shared with any of ``tensors``; or None for new memory.

    Returns:
        The list of destinations.
    """
    if op is Op.ADASUM:
        return _adasum(group, tensors, prescale, postscale, into)
    together = _batches(tensors)
    buffers: list[tuple[torch.Tensor, int, float]] = []
    works = []
    sent, divisor = (Op.SUM, group.size) if op is Op.AVERAGE else (op, 1)
    for indices in together:
        first, target = tensors[indices[0]], into[indices[0]]
        widened = op is Op.AVERAGE and first.dtype in _SMALL
        begin: Callable[..., Work]
        alone = len(indices) == 1 and target is not first and not widened and prescale == 1.0
        # The check with isinstance() is last, because it takes 5 to 15 us for a protocol.
        if alone and isinstance(group, ReducesInto):
            source = first.detach().resolve_neg().contiguous().reshape(-1)
            flat = torch.empty_like(source) if target is None else target.detach().view(-1)
            begin = functools.partial(group.allreduce_into, flat, source)
        else:
            flat = _flat([tensors[at] for at in indices], [into[at] for at in indices], widened)
            scale_(flat, prescale)
            begin = functools.partial(group.allreduce, flat)
        if group.scales_inside and flat.is_floating_point():
            works.append(begin(sent, *_scale(postscale, divisor)))
            buffers.append((flat, 1, 1.0))
        else:
            works.append(begin(sent))
            buffers.append((flat, divisor, postscale))

    def finish() -> list[torch.Tensor]:
        results = list(tensors)
        for indices, (flat, size, factor) in zip(together, buffers, strict=True):
            divide_(flat, size, factor)
            _place_all(flat, tensors, indices, into, results)
        return results

    return works, finish


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the indices of tensors into batches. Small tensors of one dtype form a batch and share a buffer.

    The result depends only on dtypes and shapes, so it is equal on all ranks.
    """
    batches: list[list[int]] = []
    small: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.nbytes >= ALONE_BYTES:
            batches.append([index])
        elif tensor.dtype in small:
            small[tensor.dtype].append(index)
        else:
            small[tensor.dtype] = [index]
            batches.append(small[tensor.dtype])
    return batches


def _adasum(
    group: Collectives,
    tensors: Sequence[torch.Tensor],
    prescale: float,
    postscale: float,
    into: Into,
) -> Started:
    """Compute Adasum in place. This function blocks, because the steps depend on each other."""
    adasum.check(group.size)
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for copy in copies:
        scale_(copy, prescale)
    adasum.reduce_(group, copies)
    for copy in copies:
        scale_(copy, postscale)

    def finish() -> list[torch.Tensor]:
        for copy, target in zip(copies, into, strict=True):
            if target is not None:
                target.detach().copy_(copy)
        return [
            copy if target is None else target for copy, target in zip(copies, into, strict=True)
        ]

    return [], finish


def reducescatter(
    group: Collectives, tensor: torch.Tensor, op: Op, prescale: float, postscale: float
) -> Started:
    """Reduce a tensor and return this rank's rows. The first ``rows % size`` ranks receive one additional row.

    Summands are added in rank order, half-precision ones in float32.
    """
    dtype, shape = tensor.dtype, tensor.shape
    rows = [rows_of(shape[0], group.size, rank) for rank in range(group.size)]
    scaled = tensor.detach().contiguous()
    if prescale != 1.0:
        scaled = scale_(scaled.clone(), prescale)
    own = rows[group.rank]
    parts = scaled.new_empty((group.size * own, *shape[1:]))
    works = [group.alltoall(parts, scaled, received=[own] * group.size, sent=rows)]

    def finish() -> torch.Tensor:
        wide = torch.float32 if dtype in _HALF else dtype
        wide = torch.int64 if dtype in _SMALL else wide
        total = parts.view(group.size, own, *shape[1:]).sum(0, dtype=wide)
        divide_(total, group.size if op is Op.AVERAGE else 1, postscale)
        return total.to(dtype)

    return works, finish


def rows_of(rows: int, size: int, rank: int) -> int:
    """Return the number of rows that a rank owns after a reducescatter of ``rows`` rows."""
    return rows // size + (1 if rank < rows % size else 0)


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor by ``factor`` in place.

    Integers are scaled in float64 and truncated, half precision in float32.
    """
    if factor == 1.0:
        return tensor
    if tensor.dtype in _HALF:
        return tensor.copy_(tensor.to(torch.float32).mul_(factor))
    if tensor.is_floating_point():
        return tensor.mul_(factor)
    return tensor.copy_(tensor.to(torch.float64).mul_(factor))


def _scale(postscale: float, size: int) -> tuple[float, int]:
    """Return the factor and the divisor that convert a sum to an average.

    As in Horovod, the sum is divided by the size, or multiplied by ``scale / size`` if a scale is given.
    """
    return (1.0, size) if postscale == 1.0 else (postscale / size, 1)


def divide_(tensor: torch.Tensor, size: int, postscale: float) -> torch.Tensor:
    """Compute ``tensor * postscale / size`` in place. Without a scale, integers are divided exactly and truncated."""
    scale, divisor = _scale(postscale, size)
    if scale != 1.0:
        return scale_(tensor, scale)
    if divisor == 1:
        return tensor
    if tensor.is_floating_point():
        return rescale_(tensor, 1.0, divisor)
    return tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def _flat(tensors: Sequence[torch.Tensor], into: Into, widened: bool) -> torch.Tensor:
    targets = [target for target in into if target is not None]
    if not widened and len(targets) == len(tensors) and _in_one_piece(targets):
        moved = [each for each in zip(targets, tensors, strict=True) if each[0] is not each[1]]
        if moved:
            torch._foreach_copy_(
                [target.detach() for target, _ in moved], [source.detach() for _, source in moved]
            )
        return targets[0].detach().as_strided((sum(each.numel() for each in targets),), (1,))
    if len(tensors) > 1:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    else:
        flat = tensors[0].detach().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.to(torch.int32) if widened else flat


def _in_one_piece(tensors: Sequence[torch.Tensor]) -> bool:
    storage, following = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != following or not tensor.is_contiguous():
            return False
        if tensor.untyped_storage().data_ptr() != storage:
            return False
        following += tensor.nbytes
    return True


def _place_all(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    indices: list[int],
    into: Into,
    results: list[torch.Tensor],
) -> None:
    if len(indices) == 1:
        (index,) = indices
        results[index] = _place(flat, tensors[index], into[index])
        return
    given = {index: target for index in indices if (target := into[index]) is not None}
    if len(given) == len(indices) and flat.data_ptr() == given[indices[0]].data_ptr():
        # The reduction has already written these results to their destinations.
        for index, target in given.items():
            results[index] = target
        return
    parts = torch.split(flat, [tensors[index].numel() for index in indices])
    targets, sources = [], []
    for index, part in zip(indices, parts, strict=True):
        if index in given:
            target = given[index].detach()
            results[index] = given[index]
        # Each result gets separate memory, so that a kept result does not keep the whole buffer alive.
        else:
            target = torch.empty_like(tensors[index], memory_format=torch.contiguous_format)
            results[index] = target
        targets.append(target)
        sources.append(part.view(target.shape))
    # All tensors are copied in one call, because a call for each would take longer than copying its few bytes.
    torch._foreach_copy_(targets, sources)


def _place(part: torch.Tensor, like: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is None:
        return part.to(like.dtype).view(like.shape)
    target = into.detach()
    if part.data_ptr() != target.data_ptr():
        target.copy_(part.view(target.shape))
    return into
