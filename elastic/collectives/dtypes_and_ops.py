"""Supported dtypes and operations of collectives. All backends raise the same errors and compute the same results.

A small tensor is sent to every rank as a whole, and each rank reduces it with `total`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import torch

from elastic.collectives.interface import Op


class DType(enum.IntEnum):
    """Dtypes that reductions support, numbered as in native/kernels.h."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    FLOAT16 = 5
    BFLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8


DTYPES = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
}
_HALF = (torch.float16, torch.bfloat16)
_INTO: dict[Op, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}
OPS = frozenset({Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT})


def check(tensor: torch.Tensor, op: Op) -> None:
    """Check the arguments of a reduction.

    Raises:
        ValueError: no backend implements the operation; callers compose it from other operations.
        TypeError: the dtype cannot be reduced.
    """
    if op not in OPS:
        raise ValueError(
            f"reduction {op.name} is not supported by this backend: pass SUM, MIN, MAX or PRODUCT"
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"tensors of {tensor.dtype} can't be reduced: convert complex tensors with torch.view_as_real()"
        )


# Gloo and NCCL have no 16-bit integers. The wider type gives equal results, since both wrap around modulo 2**16.
_WIDENED = {torch.int16: torch.int32}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def carried(
    tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1
) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return the tensor that Gloo and NCCL reduce instead of ``tensor``, and a function that completes the result.

    The function must be called after the reduction, and is None if the result is already complete.

    For MIN and MAX of floats, the returned tensor contains their `_order`, in 32 or 64 bits.
    """
    result = tensor.detach()  # In-place writes to a parameter must not be tracked by autograd.
    if tensor.dtype in _WIDENED:
        wide = tensor.to(_WIDENED[tensor.dtype])
        return wide, lambda: result.copy_(wide)
    if not tensor.is_floating_point():
        return tensor, None
    if op in (Op.MIN, Op.MAX):
        keys = _order(result, op)
        return keys, lambda: _put_floats(result, keys, op, scale, divisor)
    if scale == 1.0 and divisor == 1:
        return tensor, None
    return tensor, lambda: rescale_(result, scale, divisor)


def rescale_(tensor: torch.Tensor, scale: float, divisor: int) -> torch.Tensor:
    """Multiply floats by ``scale``, then divide by ``divisor``, in place. Each of the two operations rounds once."""
    # Complex division can be off by one bit, so scale the real and imaginary parts.
    if tensor.is_complex():
        rescale_(torch.view_as_real(tensor), scale, divisor)
        return tensor
    if scale != 1.0:
        tensor.mul_(scale)
    if divisor == 1:
        return tensor
    if tensor.device.type == "cpu" or tensor.dtype not in _INTEGERS:
        return tensor.div_(divisor)
    # On a GPU, torch divides by a number by multiplying with its reciprocal, which can be off by one bit.
    return tensor.div_(torch.full((), divisor, dtype=tensor.dtype, device=tensor.device))


def _order(floats: torch.Tensor, op: Op) -> torch.Tensor:
    """Map floats to integers that compare in the same order.

    -0.0 is less than 0.0, and a NaN takes precedence over all numbers under ``op``.

    If floats were reduced directly, NCCL would ignore NaNs, and with Gloo the result would depend on which ranks have
    them.
    """
    wide = floats if floats.dtype in _INTEGERS else floats.float()
    keys = _turned(wide.view(_INTEGERS[wide.dtype]))
    return keys.masked_fill_(wide.isnan(), _beyond(keys, op))


def _put_floats(
    result: torch.Tensor, keys: torch.Tensor, op: Op, scale: float, divisor: int
) -> None:
    """Convert integers of `_order` back to floats, and scale them.

    Finally, every NaN is set to `math.nan`, because torch's conversion to bfloat16 changes NaNs.
    """
    wide = torch.float32 if keys.dtype == torch.int32 else torch.float64
    rescale_(result.copy_(_turned(keys).view(wide)), scale, divisor)
    result.masked_fill_(keys == _beyond(keys, op), math.nan)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    info = torch.iinfo(bits.dtype)
    return (bits >> (info.bits - 1)).bitwise_and_(info.max).bitwise_xor_(bits)


def _beyond(keys: torch.Tensor, op: Op) -> int:
    info = torch.iinfo(keys.dtype)
    return info.max if op is Op.MAX else info.min


def total(parts: Sequence[torch.Tensor] | torch.Tensor, op: Op) -> torch.Tensor:
    """Reduce the ranks' parts in rank order, so that all ranks get the same bits on every machine.

    Half precision is summed in float32 and rounded once; integers wrap around.
    """
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in _HALF else dtype
    found = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _INTO[op](found, part.to(wide), out=found)
    return found.to(dtype)
