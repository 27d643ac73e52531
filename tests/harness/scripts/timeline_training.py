"""Small steps until a file ``stop`` exists; then, if there is a driver, a second timeline that the script starts."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic


def read(path: str) -> Any:
    """A read that coincides with a write of another rank is repeated for 5 s."""
    until = time.monotonic() + 5.0
    while True:
        try:
            with open(path) as file:
                return json.load(file)
        except json.JSONDecodeError:
            if time.monotonic() > until:
                raise


def main() -> None:
    elastic.init()
    model = torch.nn.Linear(4, 2)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        stop = False
        while not stop:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            seen = torch.tensor([float(os.path.exists("stop"))])
            stop = bool(elastic.allreduce(seen, op=elastic.Max, name="stop").item())
            state.step += 1
            state.commit()
            time.sleep(0.01)
        elastic.stop_timeline()
        elastic.start_timeline("second.json", mark_cycles=True)
        handle = elastic.allreduce_async(torch.ones(1), name="again")
        while not elastic.poll(handle):
            time.sleep(0.001)  # so that the engine's own thread runs: only that one has cycles
        elastic.synchronize(handle)
        elastic.stop_timeline()
        names = {event["name"] for event in read("second.json")}
        print("second:", "CYCLE_START" in names, "ALLREDUCE" in names, flush=True)

    train(state)


if __name__ == "__main__":
    main()
