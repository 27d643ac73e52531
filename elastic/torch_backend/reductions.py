"""Conversion of torch's reduction operators to those of a group.

A group computes sums, products, minima and maxima. Averages and factors are scaled sums. Bitwise operators are applied
to the gathered values of all ranks. Bools are reduced as bytes that are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives import dtypes_and_ops
from elastic.collectives.interface import Op

Kind: Any = c10d.ReduceOp.RedOpType

_AT_ONCE = {
    Kind.SUM: Op.SUM,
    Kind.AVG: Op.SUM,
    Kind.PREMUL_SUM: Op.SUM,
    Kind.PRODUCT: Op.PRODUCT,
    Kind.MIN: Op.MIN,
    Kind.MAX: Op.MAX,
}
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    Kind.BAND: torch.bitwise_and,
    Kind.BOR: torch.bitwise_or,
    Kind.BXOR: torch.bitwise_xor,
}
# operators on bools: a sum is true if any value is true, a product if all values are true
_OF_BOOLS = {Op.SUM: Op.MAX, Op.PRODUCT: Op.MIN, Op.MIN: Op.MIN, Op.MAX: Op.MAX}


class Reduction(NamedTuple):
    """Reduction operator. ``factor`` is the number or one-element tensor of PREMUL_SUM, otherwise None."""

    kind: Any
    factor: float | torch.Tensor | None = None

    @property
    def op(self) -> Op | None:
        """Return the operator of the group, or None without an equivalent."""
        return _AT_ONCE.get(self.kind)

    def scale(self, size: int) -> tuple[float, int]:
        """Return the factor and the divisor that the group applies to its result."""
        if self.kind == Kind.AVG:
            return 1.0, size
        return (1.0 if self.factor is None else float(self.factor)), 1


SUM = Reduction(Kind.SUM)


def read(op: Any) -> Reduction:
    """Convert a ``torch.distributed.ReduceOp`` or one of its kinds to a `Reduction`."""
    kind = getattr(op, "op", op)
    if kind == Kind.PREMUL_SUM:
        return Reduction(kind, op.__getstate__()[1])
    return Reduction(kind)


def reducible(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return a view of the tensor that a group can reduce. A complex tensor is viewed as real numbers.

    Raises:
        TypeError: the operator is undefined for the dtype.
    """
    if tensor.is_complex():
        if reduction.kind not in (Kind.SUM, Kind.AVG, Kind.PREMUL_SUM):
            raise TypeError(f"{reduction.kind.name} is not defined for {tensor.dtype}: use SUM")
        return torch.view_as_real(tensor)
    bitwise = reduction.kind in _BITWISE
    if bitwise and tensor.is_floating_point():
        raise TypeError(
            f"{reduction.kind.name} is not defined for {tensor.dtype}: convert the tensor to an integer dtype"
        )
    if tensor.dtype is torch.bool:
        if reduction.kind in (Kind.AVG, Kind.PREMUL_SUM):
            raise TypeError(f"{reduction.kind.name} is not defined for bools: use SUM, MIN or MAX")
        return tensor
    if tensor.dtype not in dtypes_and_ops.DTYPES and not bitwise:
        raise TypeError(
            f"tensors of {tensor.dtype} can't be reduced: convert them to a dtype of 16 bits or more"
        )
    return tensor


def of_bools(op: Op) -> Op:
    """Return the operator on bytes 0 and 1 that is equivalent to ``op`` on bools."""
    return _OF_BOOLS[op]


def divide_integers_(tensor: torch.Tensor, reduction: Reduction, size: int) -> None:
    """Scale an integer result in place, since groups scale only floats. Averages are truncated towards zero."""
    if tensor.is_floating_point():
        return
    if reduction.kind == Kind.AVG:
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))
    elif reduction.factor is not None:
        tensor.copy_(tensor.to(torch.float64).mul_(float(reduction.factor)))


def combine_into(place: torch.Tensor, parts: torch.Tensor, reduction: Reduction) -> None:
    """Reduce like `combine`, but sum float32 and float64 in place, which needs no temporary memory."""
    direct = parts.dtype in (torch.float32, torch.float64) and reduction.op is Op.SUM
    if not direct or len(parts) == 1 or not place.is_contiguous():
        place.copy_(combine(parts, reduction).view(place.shape))
        return
    row = place.view(-1)
    torch.add(parts[0], parts[1], out=row)
    for part in parts[2:]:
        row.add_(part)
    dtypes_and_ops.rescale_(row, *reduction.scale(len(parts)))


def combine(parts: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Reduce the rows of ``parts``, which are the parts of the ranks in order."""
    bitwise = _BITWISE.get(reduction.kind)
    if bitwise is not None:
        found = parts[0].clone()
        for part in parts[1:]:
            bitwise(found, part, out=found)
        return found
    op = reduction.op
    assert op is not None
    if parts.dtype is torch.bool:
        return parts.any(0) if of_bools(op) is Op.MAX else parts.all(0)
    found = dtypes_and_ops.total(parts, op)
    size = len(parts)
    if found.is_floating_point():
        return dtypes_and_ops.rescale_(found, *reduction.scale(size))
    divide_integers_(found, reduction, size)
    return found
