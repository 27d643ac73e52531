"""Collectives of a worker that has not joined a world, which behave as if all ranks had this worker's values.

A worker builds its model, its DistributedDataParallel and its samplers before it joins, with a provisional rank and
size. The collectives of this module use the values of this worker as the values of all ranks, and send no data. The
groups of this module are replaced when the worker joins.
"""

from __future__ import annotations

import torch

from elastic.collectives.interface import Op, Work
from elastic.collectives.single_rank import LocalCollectives


class MirrorCollectives(LocalCollectives):
    """Collectives of rank ``rank`` of ``size`` identical ranks."""

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
        """Fill the rows of each rank with the rows that this rank sends to itself, truncated to the expected number."""
        begin = sum(sent[: self.rank])
        own = tensor[begin : begin + sent[self.rank]]
        for place in output.split(received):
            count = min(len(place), len(own))
            place[:count].copy_(own[:count].view(place[:count].shape))
        return self.barrier()
