"""What can be reduced: one table and one check, so that every backend refuses the same with the same words."""

from __future__ import annotations

import torch

from elastic.collectives.interface import Op
from elastic.collectives.library import DType

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
OPS = frozenset({Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT})


def check(tensor: torch.Tensor, op: Op) -> None:
    """Raises ValueError for an operation that is made of others above the seam, TypeError for a dtype."""
    if op not in OPS:
        raise ValueError(f"{op.name} can't be reduced here; use SUM, MIN, MAX or PRODUCT")
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"tensors of {tensor.dtype} can't be reduced; convert it first, a complex one with torch.view_as_real()"
        )
