"""Trains a model sharded by ``fully_shard``, and may have to die at a failpoint; its own: forward, backward, optimizer.

STEPS  how many.   FEATURE  see `FEATURES`.   COPIES  of each shard.   FULL  every so many steps, wait for 4 workers.
At the end every worker writes ``out/WORKER.json``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elastic
from elastic.failpoints import failpoint, set_step

SIZE = 24  # of a batch: worlds of 1, 2, 3 and 4 share it equally
FEATURES = ("plain",)


class Network(nn.Module):
    """Rows that no number of ranks divides, shards without rows, and a buffer that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 67)
        self.second = nn.Linear(67, 67)
        self.third = nn.Linear(67, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.first(points).tanh()
        if hidden.requires_grad:
            failpoint("forward")
            hidden.register_hook(lambda _: failpoint("backward"))
        found: torch.Tensor = self.third(self.second(hidden).tanh())
        return found


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.randn(SIZE, 20, generator=torch.Generator().manual_seed(step))[rank::size]
    return points, points.sin().sum(1, keepdim=True)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, size: int
) -> torch.Tensor:
    points, wanted = batch(step, rank, size)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(points), wanted)
    loss.backward()
    failpoint("optimizer")
    optimizer.step()
    return loss.detach()


def alone(steps: int) -> list[float]:
    """The losses of one undisturbed process."""
    model = network()
    optimizer = optimizer_of(model)
    return [float(update(model, optimizer, step, 0, 1)) for step in range(steps)]


def main() -> None:
    from torch.distributed.fsdp import fully_shard

    steps, full = int(os.environ["STEPS"]), int(os.environ.get("FULL", "0"))
    dist.init_process_group()
    model: Any = network()
    for layer in (model.first, model.second, model.third):
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    ids = [id(each) for each in (model, optimizer, *model.parameters())]
    copies = int(os.environ.get("COPIES", "1"))
    state = elastic.TorchState(
        model=model, optimizer=optimizer, step=0, losses={}, sizes={}, copies=copies
    )

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.step < steps:
            rank, size = dist.get_rank(), dist.get_world_size()
            if full and state.step % full == 0 and size < 4:
                time.sleep(0.02)
                state.check_host_updates()
                dist.barrier()
                continue
            set_step(state.step)
            loss = update(model, optimizer, state.step, rank, size)
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            model.steps += 1
            state.losses[state.step] = float(loss)
            state.sizes[state.step] = size
            state.step += 1
            state.commit()

    train(state)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    found = {
        "losses": [state.losses[step] for step in range(steps)],
        "sizes": [state.sizes[step] for step in range(steps)],
        "same": ids == [id(each) for each in (model, optimizer, *model.parameters())],
        "counted": float(model.steps),
        "digest": float(
            sum(each.full_tensor().detach().double().sum() for each in model.parameters())
        ),
        "norm": float(norm.full_tensor()),
    }
    worker = f"{os.environ['LOCAL_RANK']}.{os.getpid()}"
    Path("out").mkdir(exist_ok=True)
    Path("out", f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
