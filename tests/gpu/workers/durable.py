"""Trains a small model in steps that depend on nothing but their number, so that the weights of each step are known:
who begins in the middle computes them from the beginning, on the same GPU, and compares bits.
"""

from __future__ import annotations

import os
import time

import torch

import horovod.torch as hvd
from gpu.workers.notes import own_gpu

STEPS = int(os.environ["STEPS"])

hvd.init()
device = own_gpu(hvd.local_rank())
torch.use_deterministic_algorithms(True)


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def backward(model: torch.nn.Module, step: int) -> None:
    """The same on every rank: an average of equal gradients is one of them, where ranks are a power of two."""
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
    model(inputs).square().mean().backward()


def difference(until: int) -> int:
    """How many elements of parameters differ from those of that many steps of torch alone."""
    wanted, optimizer = made()
    for step in range(until):
        optimizer.zero_grad()
        backward(wanted, step)
        optimizer.step()
    pairs = zip(wanted.parameters(), model.parameters(), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


model, plain = made()
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    if hvd.rank() == 0:
        print(f"begins at step {state.step}, differ {difference(state.step)}", flush=True)
    while state.step < STEPS:
        optimizer.zero_grad()
        backward(model, state.step)
        optimizer.step()
        state.step += 1
        time.sleep(0.05)
        state.commit()
        if hvd.rank() == 0 and state.step % 5 == 0:
            print(f"step {state.step}", flush=True)


train(state)
if hvd.rank() == 0:
    print(f"ends at step {state.step}, differ {difference(state.step)}", flush=True)
