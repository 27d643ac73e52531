"""The training of a job's history, repeated in one process on the CPU: exact to the bit."""

from __future__ import annotations

import torch

from harness.history import History, trained_alone


def replayed(history: History, optimizer: str) -> tuple[list[float], torch.Tensor]:
    """Losses by step, and the final parameters, float32 [parameters]. Each step with the ranks that it was committed
    with, whose gradients are added in the order of the communicator: as the made-up NCCL does. That is the order of the
    shards, which a worker keeps although its rank changes.
    """
    last: dict[int, int] = {}  # by step: the last generation that has done it
    for record in history.all("step"):
        last[record["step"]] = max(last.get(record["step"], 0), record["generation"])
    assert sorted(last) == list(range(len(last))), sorted(last)
    orders = {
        generation: [each["rank"] for each in sorted(entered, key=lambda each: each["position"])]
        for generation, entered in history.enters().items()
    }
    return trained_alone([orders[last[step]] for step in range(len(last))], optimizer)
