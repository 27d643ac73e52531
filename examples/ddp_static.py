"""Train a small network with DistributedDataParallel, as torch's own tutorial does. The script uses only torch.

torchrun --nproc-per-node 2 examples/ddp_static.py
elasticrun -np 2 examples/ddp_static.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data() -> TensorDataset:
    """Return points and a smooth function of them, the same on every rank."""
    random = torch.Generator().manual_seed(0)
    points = torch.randn(512, 20, generator=random)
    return TensorDataset(points, points.sin().sum(1, keepdim=True))


def main(epochs: int = 3) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = data()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for points, wanted in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(points), wanted)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.6f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
