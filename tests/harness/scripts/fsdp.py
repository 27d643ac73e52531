"""Trains a model sharded by ``fully_shard``, and may have to die at a failpoint; its own: forward, backward, optimizer.

STEPS  how many.   FEATURE  see `FEATURES`.   COPIES  of each shard.   FULL  every so many steps, wait for 4 workers.
SLOW  seconds of pause after each step.   LEAST  shards: replicas of them.
COPIES and LEAST are one number, or one of each rank: 1,2.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import elastic
from elastic.failpoints import failpoint, set_step

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

    def objects(self) -> list[int]:
        return [id(each) for each in (self.model, *self.optimizers, *self.model.parameters())]


def alone(steps: int, feature: str) -> list[float]:
    """Return the losses of one undisturbed process."""
    training = Training(feature, sharded=False)
    return [float(training.step(step)) for step in range(steps)]


def gathered(parameter: Any) -> torch.Tensor:
    whole: torch.Tensor = getattr(parameter, "full_tensor", lambda: parameter)()
    return whole.detach().double()


def of_rank(numbers: str) -> int:
    each = numbers.split(",")
    return int(each[dist.get_rank() % len(each)])


def main() -> None:
    steps, full = int(os.environ["STEPS"]), int(os.environ.get("FULL", "0"))
    feature = os.environ.get("FEATURE", "plain")
    dist.init_process_group()
    training = Training(feature, sharded=True)
    model = training.model
    ids = training.objects()
    more: dict[str, Any] = {
        f"optimizer{number}": each for number, each in enumerate(training.optimizers)
    }
    if training.average is not None:
        more["average"] = training.average
    copies = of_rank(os.environ.get("COPIES", "1"))
    if "LEAST" in os.environ:
        more["least_shards"] = of_rank(os.environ["LEAST"])
    state = elastic.TorchState(
        model=model,
        schedule=training.schedule,
        step=0,
        losses={},
        sizes={},
        meshes={},
        copies=copies,
        **more,
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
            # Not after the step, which leaves gathered parameters behind if FEATURE is evaluate.
            shape = list(next(model.parameters()).device_mesh.shape)
            loss = training.step(state.step, rank, size)
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            model.steps += 1
            state.losses[state.step] = float(loss)
            state.sizes[state.step] = size
            state.meshes[state.step] = shape
            state.step += 1
            state.commit()
            if state.step == 10:
                print("at step 10", flush=True)
            time.sleep(float(os.environ.get("SLOW", "0")))

    train(state)
    same = ids == training.objects() or feature == "evaluate"  # which has gathered parameters now
    found = {
        "losses": [state.losses[step] for step in range(steps)],
        "sizes": [state.sizes[step] for step in range(steps)],
        "meshes": [state.meshes[step] for step in range(steps)],
        "same": same,
        "counted": float(model.steps),
        "digest": float(sum(gathered(each).sum() for each in model.parameters())),
    }
    worker = f"{os.uname().nodename}.{os.environ['LOCAL_RANK']}.{os.getpid()}"
    Path("out").mkdir(exist_ok=True)
    Path("out", f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
