"""What is alike for Gloo and NCCL behind one of torch's process groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from elastic.collectives.interface import Op, Work

REDUCE = {
    Op.SUM: c10d.ReduceOp.SUM,
    Op.MIN: c10d.ReduceOp.MIN,
    Op.MAX: c10d.ReduceOp.MAX,
    Op.PRODUCT: c10d.ReduceOp.PRODUCT,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a vector of bytes: Gloo and NCCL move only some dtypes, but all bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class MovesBytes:
    """The collectives that reduce nothing, by what submits one of torch's."""

    def submit(self, name: str, *arguments: Any, then: Callable[[], object] | None = None) -> Work:
        """Calls this method of torch's process group; ``then`` puts the result in place."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self.submit("broadcast", [as_bytes(tensor)], options)

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self.submit("allgather", [[as_bytes(each) for each in outputs]], [as_bytes(tensor)])

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        return self.submit(
            "alltoall_base",
            as_bytes(output),
            as_bytes(tensor),
            [rows * row for rows in received],
            [rows * row for rows in sent],
        )
