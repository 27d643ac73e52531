"""Commits while the GPU is busy, overwrites the committed tensors, restores, and compares bits. A world of one."""

from __future__ import annotations

import torch

import horovod.torch as hvd
from gpu.workers.notes import SMALL, note, own_gpu

BUSY_CYCLES = 500_000_000  # a third of a second
WIDTH = 64 if SMALL else 4096

hvd.init()
device = own_gpu(0)


def live(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of everything that a commit holds."""
    tensors = list(model.state_dict().values())
    for entries in optimizer.state.values():
        tensors += [value for value in entries.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, WIDTH, device=device)).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def spoil(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In stream order, at once: a copy of the commit that is still under way must not see it."""
    for parameter in model.parameters():
        parameter.mul_(-3).add_(1)
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor):
                value.add_(1)


for kind in ("SGD", "Adam", "AdamW fused"):
    for busy in (False, True):
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 8)
        ).to(device)
        parameters = model.parameters()
        optimizer: torch.optim.Optimizer
        if kind == "SGD":
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        elif kind == "Adam":
            optimizer = torch.optim.Adam(parameters)
        else:
            optimizer = torch.optim.AdamW(parameters, fused=True)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        for count in range(3):
            step(model, optimizer)
            state.step = count
            if busy:
                torch.cuda._sleep(BUSY_CYCLES)
            wanted = live(model, optimizer)
            state.commit()
            spoil(model, optimizer)  # nothing has waited for the GPU
            state.step = 99
            state.restore()
            found = live(model, optimizer)
            assert state.step == count
            assert len(found) == len(wanted) > 4
            same = [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
            assert all(same), (kind, busy, count, same)
        note("restored", optimizer=kind, busy=busy, tensors=len(found))
note("done")
