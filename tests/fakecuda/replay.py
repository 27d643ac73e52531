"""The training that a job's history tells of, done again in one process on the CPU: to the bit."""

from __future__ import annotations

import torch

from harness.history import History, training_problem


def replayed(history: History, optimizer: str) -> tuple[list[float], torch.Tensor]:
    """Losses by step, and the final parameters, float32 [parameters]. Each step with as many ranks as it was committed
    with, whose gradients are added in their order: as the made-up NCCL does.
    """
    sizes: dict[int, tuple[int, int]] = {}  # by step: the last generation that has done it
    for record in history.all("step"):
        sizes[record["step"]] = max(
            sizes.get(record["step"], (0, 0)), (record["generation"], record["size"])
        )
    assert sorted(sizes) == list(range(len(sizes))), sorted(sizes)
    problem = training_problem()
    model = problem.model()
    descent = problem.optimizer(optimizer, model)
    losses = []
    for step in range(len(sizes)):
        size = sizes[step][1]
        inputs, wanted = problem.batch(step)
        sums: list[torch.Tensor] = []
        total = 0.0
        for rank in range(size):
            descent.zero_grad()
            difference = model(inputs[rank::size]) - wanted[rank::size]
            loss = difference.square().sum() / problem.SAMPLES
            loss.backward()
            total += float(loss.detach())
            gradients = [p.grad.clone() for p in model.parameters()]
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        descent.step()
        problem.change_options(step, descent)
        losses.append(total)
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])
