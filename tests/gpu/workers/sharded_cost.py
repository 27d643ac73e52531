"""Steps of a model that FSDP2 shards, over our process group and torch's in turns, then with a commit after each.

MEGABYTES of state in all ranks. ROOM=0: the GPU is said to have no memory for a second copy of the shards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import horovod.torch as hvd
from gpu.workers.notes import SMALL, note, own_gpu

STEPS = 3 if SMALL else 8
WIDTH = 64 if SMALL else 4096
BYTES = 12  # of a parameter: its value and two moments

hvd.init()
device = own_gpu(hvd.local_rank())
distributed.init_process_group()
if os.environ["ROOM"] != "1":
    setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))  # noqa: B010 - not for mypy
layers = max(1, round(float(os.environ["MEGABYTES"]) * 1e6 / (BYTES * WIDTH * WIDTH)))
inputs = torch.randn(64, WIDTH, device=device)


def training(group: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    model.to(device)
    mesh = DeviceMesh.from_group(group, "cuda")
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def median_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        hvd.allreduce(torch.zeros(1), name="together")
        began = time.monotonic()
        step()
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return sorted(times)[STEPS // 2] * 1e3


def beside_torchs() -> None:
    groups: dict[str, Any] = {"elastic": distributed.group.WORLD}
    groups["nccl"] = distributed.new_group(backend="nccl")
    steps = {name: training(group)[2] for name, group in groups.items()}
    for step in steps.values():
        step()
    for name, step in steps.items():
        note("time", backend=name, median_ms=median_ms(step))
    distributed.destroy_process_group(groups["nccl"])


beside_torchs()
torch.cuda.empty_cache()
model, optimizer, step = training(distributed.group.WORLD)
step()
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    blocked: list[float] = []

    def committing() -> None:
        step()
        began = time.monotonic()
        state.commit()
        blocked.append(time.monotonic() - began)
        step()  # held up by a copy under way

    def twice() -> None:
        step()
        step()

    committing()  # allocates memory
    blocked.clear()
    plain_ms = median_ms(twice)
    stalled_ms = median_ms(committing) - plain_ms
    note("commit", blocked_ms=sorted(blocked)[STEPS // 2] * 1e3, stall_ms=stalled_ms)


train(state)
note("done")
