"""Trains with FSDP2 (``fully_shard``), in a world of a fixed size, and says how far its weights are from those of one
process that has everybody's samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 7), nn.Linear(7, 1))


def train(model: Any, ranks: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        random = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
        points = torch.cat([torch.randn(6, 8, generator=each) for each in random])
        nn.functional.mse_loss(model(points), points.sum(1, keepdim=True)).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, sharded = network(), network()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(alone, range(size))
    train(sharded, range(rank, rank + 1))
    pairs = zip(alone.parameters(), sharded.parameters(), strict=True)
    off = max(float((one - other.full_tensor()).abs().max().detach()) for one, other in pairs)
    print(f"off by {off:.9f}")


if __name__ == "__main__":
    main()
