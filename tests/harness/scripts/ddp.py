"""Trains with DistributedDataParallel in one of its ways, and may have to die in the middle of a backward pass.

FEATURE  which: see `FEATURES`.   STEPS  how many.   DIE  ``slot=0,step=5;...``: SIGKILL in backward, of a first worker.
FULL: every 40 steps, wait for so many workers. At the end every worker writes ``out/WORKER.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

# In a separate process: the tests' process may compile.
if __name__ == "__main__" and os.environ["FEATURE"] != "compiled":
    import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic

FEATURES = (
    "plain", "fp16", "builtin", "powersgd", "no_sync", "static_graph", "buffers", "unused", "bucket_view", "join",
    "sparse", "compiled",
)  # fmt: skip
SIZE = 96  # batch size; worlds of 1, 2 and 3 share it equally
dying: set[int] = set()  # steps in which this worker dies


class Network(nn.Module):
    """Return a model with several buckets, and whatever the feature needs."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.table = nn.Embedding(10, 20, sparse=feature == "sparse")
        self.first = nn.Linear(20, 128)
        self.norm = nn.BatchNorm1d(128) if feature == "buffers" else nn.Identity()
        self.second = nn.Linear(128, 1)
        self.sometimes = nn.Linear(128, 1)
        self.step = 0

    def forward(self, points: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        hidden = self.first(points + self.table(words))
        if hidden.requires_grad and self.step in dying:
            hidden.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        # Smooth, because a sum in another order that moves a sample over a kink changes the loss.
        hidden = self.norm(hidden).tanh()
        used = self.feature != "unused" or self.step % 2
        found: torch.Tensor = self.second(hidden)
        return found + self.sometimes(hidden) if used else found


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    points, words = (
        torch.randn(SIZE, 20, generator=random),
        torch.randint(10, (SIZE,), generator=random),
    )
    mine = slice(rank, None, size)
    return points[mine], words[mine], points[mine].sin().sum(1, keepdim=True)


def wrapped(network: Network, feature: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    options: dict[str, Any] = {
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "bucket_view": {"gradient_as_bucket_view": True},
    }.get(feature, {})
    # The compiler accepts no first bucket that is the largest.
    small = None if feature == "compiled" else 0.005
    model = DistributedDataParallel(network, bucket_cap_mb=small, **options)
    if feature == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif feature == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    elif feature == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=3, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if feature == "compiled":
        return torch.compile(model, backend="aot_eager")
    return model


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    points, words, wanted = batch(step, rank, size)
    return nn.functional.mse_loss(model(points, words), wanted)


def take_step(model: Any, network: Network, optimizer: torch.optim.Optimizer, step: int) -> None:
    network.step = step
    optimizer.zero_grad()
    rank, size = dist.get_rank(), dist.get_world_size()
    if network.feature == "no_sync":
        with model.no_sync():
            loss_of(model, step, rank, size).backward()
    with model.join() if network.feature == "join" else contextlib.nullcontext():
        loss_of(model, step, rank, size).backward()
    optimizer.step()


def alone(feature: str, steps: int) -> float:
    """Return the loss after this number of steps of one process with the whole batch."""
    torch.manual_seed(1)
    network = Network(feature)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.005)
    for step in range(steps):
        network.step = step
        optimizer.zero_grad()
        for _ in range(2 if feature == "no_sync" else 1):
            loss_of(network, step, 0, 1).backward()
        optimizer.step()
    return loss_of(network.eval(), steps, 0, 1).item()


def main() -> None:
    feature, worker, steps = (
        os.environ["FEATURE"],
        os.environ["ELASTIC_WORKER"],
        int(os.environ["STEPS"]),
    )
    slot, start = worker.rpartition(":")[2].split("#")
    for rule in filter(None, os.environ.get("DIE", "").split(";")):
        told = dict(pair.split("=") for pair in rule.split(","))
        if (told["slot"], told.get("start", "1")) == (slot, start):
            dying.add(int(told["step"]))
    full = int(os.environ.get("FULL", "1"))
    dist.init_process_group()
    torch.manual_seed(1)
    network = Network(feature)
    model = wrapped(network, feature)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.005)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0, sizes=[])

    @elastic.run
    def train(state: Any) -> None:
        while state.step < steps:
            while state.step % 40 == 0 and dist.get_world_size() < full:
                time.sleep(0.005)
                state.commit()
            take_step(model, network, optimizer, state.step)
            state.sizes.append(dist.get_world_size())
            state.step += 1
            state.commit()

    train(state)
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    found = {
        "digest": digest.hexdigest(),
        "loss": loss_of(network.eval(), steps, 0, 1).item(),
        "sizes": state.sizes,
        "world": [dist.get_rank(), dist.get_world_size()],
    }
    Path("out").mkdir(exist_ok=True)
    Path(f"out/{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
