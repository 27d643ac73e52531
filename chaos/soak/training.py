"""What the soak trains: a small model, a commit after every step, until a file exists. Started by `command`.

Each process also watches over its own commits: whoever comes back to a step before one that it had committed says so,
and fails. Its imports are cheap, because it's started some hundred times.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import elastic
from elastic.chaos.hosts.workers.no_compile import without_compiler

STEP_S = 0.02  # besides the work, so that a machine with few cores has room for imports
WIDTH = 128
BATCH = 64


def main(over: str) -> None:
    """``over``: the file whose existence ends the training."""
    without_compiler()
    torch.set_num_threads(1)
    elastic.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    committed = 0

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        nonlocal committed
        if state.step < committed:
            raise AssertionError(f"back at step {state.step}, after step {committed} was committed")
        while True:
            # One looks, all hear: they end at the same step.
            found = torch.tensor([float(elastic.rank() == 0 and os.path.exists(over))])
            if elastic.allreduce(found, op=elastic.Max, name="over").item():
                return
            dice = torch.Generator().manual_seed(state.step * 64 + elastic.rank())
            batch = torch.randn(BATCH, WIDTH, generator=dice)
            optimizer.zero_grad()
            loss = (model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            state.step += 1
            time.sleep(STEP_S)
            state.commit()
            committed = state.step

    train(elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main(sys.argv[1])
