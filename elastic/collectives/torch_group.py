"""Helper for torch's process groups, shared by the Gloo and NCCL backends."""

from __future__ import annotations

import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives.interface import Op

REDUCE = {
    Op.SUM: c10d.ReduceOp.SUM,
    Op.MIN: c10d.ReduceOp.MIN,
    Op.MAX: c10d.ReduceOp.MAX,
    Op.PRODUCT: c10d.ReduceOp.PRODUCT,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as a flat uint8 tensor, because Gloo and NCCL support only some dtypes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
