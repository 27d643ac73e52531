"""Small steps until a file ``stop`` exists; then, if there is a driver, a second timeline that the script starts."""

from __future__ import annotations

import json
import os
import time

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic


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
        with open("second.json") as file:
            names = {event["name"] for event in json.load(file)}
        print("second:", "CYCLE_START" in names, "ALLREDUCE" in names, flush=True)

    train(state)


if __name__ == "__main__":
    main()
