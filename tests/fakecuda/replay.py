"""The training of a job's history, repeated in one process on the CPU: exact to the bit."""

from __future__ import annotations

import torch

from harness.history import History, trained_alone


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
    return trained_alone([sizes[step][1] for step in range(len(sizes))], optimizer)
