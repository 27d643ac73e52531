"""Task of `training.py`, also for the test that repeats it alone: data, model, optimizers. Starts nothing."""

from __future__ import annotations

import torch

SAMPLES = 12


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs float32 [12, 6] and targets float32 [12, 3] of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, inputs.sin() @ torch.ones(6, 3)


def model(seed: int = 0, width: int = 8) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    )


def optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    match name:
        case "Adam":
            return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
        case "plain SGD":
            return torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.1)
        case _:
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def change_options(step: int, optimizer: torch.optim.Optimizer) -> None:
    """Once, so that it must be sent to later workers."""
    if step == 1:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] *= 2
