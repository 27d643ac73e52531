"""What can be reduced, and as what: every backend refuses the same with the same words, and gives the same numbers.

What is small enough is sent to every rank whole, and reduced there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from elastic.collectives.interface import Op
from elastic.collectives.shared_memory.native_library import DType

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
    """Raises ValueError for an operation that is made of others above the seam, TypeError for a dtype."""
    if op not in OPS:
        raise ValueError(f"{op.name} can't be reduced here; use SUM, MIN, MAX or PRODUCT")
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"tensors of {tensor.dtype} can't be reduced; convert it first, a complex one with torch.view_as_real()"
        )


# Gloo and NCCL have no 16-bit integers. The wider type gives the same ones, as both wrap around modulo 2**16.
_WIDENED = {torch.int16: torch.int32}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def carried(
    tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1
) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """What Gloo and NCCL are given to reduce for `tensor`, and what is called when they have, if anything.

    For MIN and MAX of floats that is their `_order`, in 32 or 64 bits.
    """
    result = tensor.detach()  # written in place even if it is a parameter
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
    """In place, of floats: times ``scale``, then divided by ``divisor``, each rounded once."""
    if scale != 1.0:
        tensor.mul_(scale)
    if divisor == 1:
        return tensor
    if tensor.device.type == "cpu" or tensor.dtype not in _INTEGERS:
        return tensor.div_(divisor)
    # On a GPU torch multiplies by the reciprocal of a number, which is off by a bit, and divides by a tensor.
    return tensor.div_(torch.full((), divisor, dtype=tensor.dtype, device=tensor.device))


def _order(floats: torch.Tensor, op: Op) -> torch.Tensor:
    """Integers in the order of these floats: -0.0 comes before 0.0, and ``op``, MIN or MAX, chooses NaN.

    Reduced as floats, NaN would be lost or not by Gloo depending on who has it, and be lost by NCCL.
    """
    wide = floats if floats.dtype in _INTEGERS else floats.float()
    keys = _turned(wide.view(_INTEGERS[wide.dtype]))
    return keys.masked_fill_(wide.isnan(), _beyond(keys, op))


def _put_floats(
    result: torch.Tensor, keys: torch.Tensor, op: Op, scale: float, divisor: int
) -> None:
    """The floats of what came of `_order`, scaled. Every NaN becomes `math.nan`, at the end: torch makes others of it
    where it converts to bfloat16.
    """
    wide = torch.float32 if keys.dtype == torch.int32 else torch.float64
    rescale_(result.copy_(_turned(keys).view(wide)), scale, divisor)
    result.masked_fill_(keys == _beyond(keys, op), math.nan)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """Negative floats rise with their magnitude where integers fall. Its own inverse."""
    info = torch.iinfo(bits.dtype)
    return (bits >> (info.bits - 1)).bitwise_and_(info.max).bitwise_xor_(bits)


def _beyond(keys: torch.Tensor, op: Op) -> int:
    """What ``op`` prefers to all numbers."""
    info = torch.iinfo(keys.dtype)
    return info.max if op is Op.MAX else info.min


def total(parts: Sequence[torch.Tensor] | torch.Tensor, op: Op) -> torch.Tensor:
    """Of the ranks' parts, in their order: so that all ranks, on whatever machine, get the same
    bits. Half precision is added up in float32 and rounded once; integers wrap around.
    """
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in _HALF else dtype
    found = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _INTO[op](found, part.to(wide), out=found)
    return found.to(dtype)
