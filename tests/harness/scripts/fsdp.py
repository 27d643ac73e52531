"""Trains a model sharded by ``fully_shard``, and may have to die at a failpoint; its own: forward, backward, optimizer.

FEATURE  see `FEATURES`.   COPIES  of each shard.   LEAST  shards: replicas of them.   Others: see ``sharded_run.py``.
COPIES and LEAST are one number, or one of each rank: 1,2.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import sharded_run  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from elastic.failpoints import failpoint

SIZE = 24  # batch size; worlds of 1, 2, 3 and 4 share it equally
FEATURES = (
    "plain", "sgd", "fused", "bf16", "keep_gathered", "reshard_root", "clip", "accumulate", "checkpointing", "tied",
    "frozen", "ignored", "two_optimizers", "schedule", "named_mesh", "evaluate", "one_unit", "no_root", "compiled",
    "offload", "unfrozen", "average",
)  # fmt: skip


class Network(nn.Module):
    """A model with rows that no number of ranks divides, shards without rows, and a buffer on every rank."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.first = nn.Linear(20, 67)
        self.second: nn.Module = nn.Linear(67, 67)
        self.again = nn.Linear(67, 67)
        self.third = nn.Linear(67, 1)
        self.register_buffer("steps", torch.zeros(()))
        if feature == "tied":
            self.again.weight = self.second.weight
        if feature in ("frozen", "unfrozen"):
            self.first.weight.requires_grad_(False)
        if feature == "checkpointing":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            self.second = checkpoint_wrapper(self.second)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.first(points).tanh()
        if hidden.requires_grad and not torch.compiler.is_compiling():
            failpoint("forward")
            hidden.register_hook(lambda _: failpoint("backward"))
        found: torch.Tensor = self.third(self.again(self.second(hidden).tanh()).tanh())
        return found


class Training:
    """Return the whole state of one process, sharded or not."""

    def __init__(self, feature: str, *, sharded: bool) -> None:
        self.feature = feature
        self.sharded = sharded
        torch.manual_seed(0)
        self.model: Any = Network(feature)
        self.average: Any = Network(feature).requires_grad_(False) if feature == "average" else None
        self.ignored: list[Any] = []
        if sharded:
            self.shard(self.model)
        if sharded and self.average is not None:
            self.shard(self.average)
        if feature == "compiled" and sharded:
            self.model.compile(backend="aot_eager")
        self.optimizers = self.make_optimizers()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3, 0.5)

    def shard(self, model: Any) -> None:
        feature = self.feature
        options: dict[str, Any] = {}
        if feature == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        elif feature in ("keep_gathered", "evaluate"):
            options["reshard_after_forward"] = False
        elif feature == "offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        elif feature == "reshard_root":
            options["reshard_after_forward"] = True
        elif feature == "ignored":
            self.ignored = [*model.third.parameters()]
            options["ignored_params"] = {*self.ignored}
        elif feature == "named_mesh":
            size = dist.get_world_size()
            options["mesh"] = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        elif feature == "hybrid_mesh":
            shape = dist.get_world_size() // 2, 2
            names = ("replicate", "shard")
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if feature not in ("tied", "one_unit"):
            for layer in (model.first, model.second, model.again, model.third):
                if not self.ignored or layer is not model.third:
                    fully_shard(layer, **options)
        if feature != "no_root":
            fully_shard(model, **options)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        trained = [*self.model.parameters()]
        if self.feature != "unfrozen":
            trained = [each for each in trained if each.requires_grad]
        if self.feature == "sgd":
            return [torch.optim.SGD(trained, lr=0.01, momentum=0.9)]
        if self.feature == "two_optimizers":
            return [
                torch.optim.AdamW(trained[:3], lr=0.01),
                torch.optim.SGD(trained[3:], lr=0.01, momentum=0.9),
            ]
        return [torch.optim.AdamW(trained, lr=0.01, fused=self.feature == "fused" or None)]

    def step(self, step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
        points = torch.randn(SIZE, 20, generator=torch.Generator().manual_seed(step))[rank::size]
        wanted = points.sin().sum(1, keepdim=True)
        if self.feature == "unfrozen" and step == 7:
            self.model.first.weight.requires_grad_(True)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        parts = 2 if self.feature == "accumulate" else 1
        total = torch.zeros(())
        for part, (some, right) in enumerate(
            zip(points.chunk(parts), wanted.chunk(parts), strict=True)
        ):
            if self.sharded and parts > 1:
                self.model.set_requires_gradient_sync(part == parts - 1)
            loss = nn.functional.mse_loss(self.model(some), right) / parts
            loss.backward()
            total += loss.detach()
        for parameter in self.ignored:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        if self.feature == "clip":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        failpoint("optimizer")
        for optimizer in self.optimizers:
            optimizer.step()
        if self.average is not None:
            with torch.no_grad():
                pairs = zip(self.average.parameters(), self.model.parameters(), strict=True)
                for average, parameter in pairs:
                    average.lerp_(parameter, 0.1)
                total += nn.functional.mse_loss(self.average(points), wanted)
        if self.feature == "schedule":
            self.schedule.step()
        if self.feature == "evaluate":
            with torch.no_grad():
                self.model(points)  # leaves gathered parameters behind
        return total


@functools.cache
def alone(steps: int, feature: str) -> list[float]:
    """Return the losses of one undisturbed process."""
    found: list[float] = sharded_run.losses(Training(feature, sharded=False), steps)
    return found


def of_rank(numbers: str) -> int:
    each = numbers.split(",")
    return int(each[dist.get_rank() % len(each)])


def main() -> None:
    feature = os.environ.get("FEATURE", "plain")
    dist.init_process_group()
    training = Training(feature, sharded=True)
    more: dict[str, Any] = {"copies": of_rank(os.environ.get("COPIES", "1"))}
    if training.average is not None:
        more["average"] = training.average
    if "LEAST" in os.environ:
        more["least_shards"] = of_rank(os.environ["LEAST"])
    found = sharded_run.run(training, **more)
    found["same"] |= feature == "evaluate"  # which has gathered parameters now
    sharded_run.write(found)


if __name__ == "__main__":
    main()
