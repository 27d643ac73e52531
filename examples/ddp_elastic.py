"""Train with DistributedDataParallel, and continue when workers are lost or join.

    elasticrun -np 3 --min-np 1 examples/ddp_elastic.py --steps 200

The lines that make a loop over steps elastic are marked. The batch of a step is the same in every world, and each rank
takes its share of it. docs/pytorch.md shows the changes to a script with epochs.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the batch of a step."""
    points = torch.randn(96, 20, generator=torch.Generator().manual_seed(step)).to(device)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return points[mine], points[mine].sin().sum(1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu", help="cuda: each worker's own GPU (%(default)s)")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    model = DistributedDataParallel(network.to(options.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)  # 1

    @elastic.run  # 2
    def train(state: elastic.TorchState) -> None:
        while state.step < options.steps:
            points, wanted = batch(state.step, options.device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(points), wanted)
            loss.backward()
            optimizer.step()
            state.step += 1
            if state.step % 50 == 0:
                dist.all_reduce(mean := loss.detach().clone(), dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(
                        f"step {state.step} loss {mean.item():.6f}, {dist.get_world_size()} workers",
                        flush=True,
                    )
            state.commit()  # 3

    train(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
