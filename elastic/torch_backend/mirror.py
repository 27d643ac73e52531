"""Collectives of a worker that has joined no world yet: as if every other rank did exactly what this one does.

A newcomer builds its model, its DistributedDataParallel and its samplers before it enters the training world, with the
rank and the size that it will about have. So that this comes out well, it finds on the other ranks what it has itself.
Nothing is sent; what is made here is replaced when it enters.
"""

from __future__ import annotations

import torch

from elastic.collectives.interface import Op, Work
from elastic.collectives.local import LocalCollectives


class MirrorCollectives(LocalCollectives):
    """``rank`` of ``size``."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        row = tensor.detach()
        if op is Op.SUM:
            row.mul_(self.size)
        elif op is Op.PRODUCT:
            row.pow_(self.size)
        return super().allreduce(tensor, op, scale, divisor)

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        for output in outputs:
            output.copy_(tensor.view(output.shape))
        return self.barrier()

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        """From each rank come the rows that this one has for itself, as many of them as there are."""
        begin = sum(sent[: self.rank])
        own = tensor[begin : begin + sent[self.rank]]
        for place in output.split(received):
            count = min(len(place), len(own))
            place[:count].copy_(own[:count].view(place[:count].shape))
        return self.barrier()
