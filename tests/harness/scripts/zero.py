"""Trains with ZeroRedundancyOptimizer, or where OURS is 1 with a DistributedOptimizer that has ``zero=1``, and may have
to die at a failpoint; its own: forward, backward, optimizer.

FEATURE  see `FEATURES`.   COPIES  of each shard.   Others: see ``sharded_run.py``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import sharded_run  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import elastic
from elastic.failpoints import failpoint

SIZE = 24  # batch size; worlds of 1, 2, 3 and 4 share it equally
FEATURES = (
    "plain", "sgd", "adam", "fused", "groups", "frozen", "schedule", "bucket_view", "without_ddp", "few_parameters",
    "two_optimizers", "late_entries", "channels_last",
)  # fmt: skip
OF_OURS = (
    "plain", "sgd", "adam", "fused", "groups", "frozen", "schedule", "few_parameters", "two_optimizers", "adagrad",
)  # fmt: skip


class Network(nn.Module):
    def __init__(self, feature: str) -> None:
        super().__init__()
        width = 1 if feature == "few_parameters" else 67
        self.first = nn.Linear(20, width)
        self.second: nn.Module = nn.Linear(width, width)
        self.image: nn.Module = nn.Conv2d(2, 3, 3, padding=1)
        self.third = nn.Linear(3 * width, 1)
        self.register_buffer("steps", torch.zeros(()))
        if feature == "few_parameters":  # fewer than ranks
            self.second = nn.Identity()
            self.image = nn.Flatten(1)
            self.third = nn.Linear(2 * width, 1, bias=False)
        if feature == "frozen":
            self.first.weight.requires_grad_(False)
        if feature == "channels_last":
            weight = self.image.weight
            assert isinstance(weight, nn.Parameter)
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.first(points).tanh()
        if hidden.requires_grad:
            failpoint("forward")
            hidden.register_hook(lambda _: failpoint("backward"))
        hidden = self.second(hidden).tanh()
        hidden = self.image(hidden[:, None, None, :].expand(-1, 2, -1, -1)).flatten(1)
        found: torch.Tensor = self.third(hidden)
        return found


class Training:
    """Training of one process, sharded or not."""

    def __init__(self, feature: str, sharded: str = "") -> None:
        self.feature = feature
        self.sharded = sharded  # by torch, ours
        torch.manual_seed(0)
        self.model: Any = Network(feature)
        if sharded == "torch" and feature != "without_ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizers = self.make_optimizers()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3, 0.5)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        feature, parameters = self.feature, [*self.model.parameters()]
        if feature == "sgd":
            return [self.divided(parameters, torch.optim.SGD, lr=0.01, momentum=0.9)]
        if feature == "two_optimizers":
            return [
                self.divided(parameters[:3], torch.optim.AdamW, lr=0.01),
                self.reduced(torch.optim.SGD(parameters[3:], lr=0.01, momentum=0.9)),
            ]
        if feature == "adagrad":  # has entries before its first step
            return [self.divided(parameters, torch.optim.Adagrad, lr=0.01)]
        groups: list[Any] = parameters
        if feature == "groups":
            groups = [
                {"params": [each for each in parameters if each.dim() > 1]},
                {"params": [each for each in parameters if each.dim() < 2], "lr": 0.003},
            ]
        kind = torch.optim.Adam if feature == "adam" else torch.optim.AdamW
        return [self.divided(groups, kind, lr=0.01, fused=feature == "fused" or None)]

    def divided(self, parameters: list[Any], kind: Any, **options: Any) -> torch.optim.Optimizer:
        if not self.sharded:
            made: torch.optim.Optimizer = kind(parameters, **options)
            return made
        if self.sharded == "ours":
            return self.reduced(kind(parameters, **options), zero=1)
        view = self.feature == "bucket_view"
        return ZeroRedundancyOptimizer(parameters, kind, parameters_as_bucket_view=view, **options)

    def reduced(self, optimizer: torch.optim.Optimizer, zero: int = 0) -> torch.optim.Optimizer:
        """Without DDP's reduction of gradients."""
        if self.sharded != "ours":
            return optimizer
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        names = [(n, each) for n, each in self.model.named_parameters() if id(each) in trained]
        made: torch.optim.Optimizer = elastic.DistributedOptimizer(optimizer, names, zero=zero)
        return made

    def step(self, step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
        points = torch.randn(SIZE, 20, generator=torch.Generator().manual_seed(step))[rank::size]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(points), points.sin().sum(1, keepdim=True))
        loss.backward()
        if self.sharded == "torch" and self.feature == "without_ddp":
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        if self.feature == "late_entries" and step < 6:
            network = getattr(self.model, "module", self.model)
            network.first.weight.grad = network.third.bias.grad = None
        failpoint("optimizer")
        for optimizer in self.optimizers:
            optimizer.step()
        if self.feature == "schedule":
            self.schedule.step()
        return loss.detach()

    def entries(self) -> int:
        """Return the bytes of the optimizers' entries in this process."""
        return sum(
            entry.nbytes
            for optimizer in self.optimizers
            for entries in getattr(optimizer, "optim", optimizer).state.values()
            for entry in entries.values()
        )


@functools.cache
def alone(steps: int, feature: str) -> list[float]:
    """Return the losses of one undisturbed process."""
    found: list[float] = sharded_run.losses(Training(feature), steps)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    how = "ours" if os.environ.get("OURS") == "1" else "torch"
    training = Training(os.environ.get("FEATURE", "plain"), how)
    found = sharded_run.run(training, copies=int(os.environ.get("COPIES", "1")))
    entries = torch.tensor(training.entries())
    dist.all_reduce(entries)
    found |= {"entries": training.entries(), "entries_of_all": int(entries)}
    sharded_run.write(found)


if __name__ == "__main__":
    main()
