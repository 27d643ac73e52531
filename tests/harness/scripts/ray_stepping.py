"""A caller in a Ray cluster that trains a small model until ``FOLDER/stop`` exists, and writes down every step.

    ray_stepping.py FOLDER NUM MIN MAX [STEP_S]

Each worker writes the time to ``FOLDER/PID.ready`` before its first step, appends ``time generation size rank step`` to
``FOLDER/PID.steps`` at each, and then commits; a time is CLOCK_MONOTONIC in seconds, one clock for all processes of a
machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import elastic.ray


def train(config: dict[str, Any]) -> int:
    import os
    import sys
    import time

    sys.path.append(config["scripts"])
    import light  # type: ignore[import-not-found]  # noqa: F401

    # isort: split
    import torch

    import elastic
    from elastic.runtime import lifecycle

    elastic.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(f"{config['folder']}/{os.getpid()}.steps", flags)

    @elastic.run
    def loop(state: elastic.TorchState) -> int:
        context = lifecycle.current()
        while True:
            optimizer.zero_grad()
            model(torch.ones(4, 64)).square().mean().backward()
            time.sleep(config["step_s"])
            optimizer.step()
            state.step += 1
            place = context.place
            words = [context.generation, place.size, place.rank, state.step]
            os.write(log, " ".join(map(str, [time.monotonic(), *words])).encode() + b"\n")
            # All must stop at the same step.
            stop = torch.tensor([float(os.path.exists(f"{config['folder']}/stop"))])
            if elastic.allreduce(stop, name="stop", op=elastic.Sum).item():
                return int(state.step)
            state.commit()

    with open(f"{config['folder']}/{os.getpid()}.ready", "w") as ready:
        ready.write(str(time.monotonic()))
    return loop(elastic.TorchState(model, optimizer, step=0))


def main() -> None:
    folder, num, least, most, *step_s = sys.argv[1:]
    result = elastic.ray.run(
        train,
        {
            "folder": folder,
            "step_s": float(step_s[0]) if step_s else 0.01,
            "scripts": str(Path(__file__).parent),
        },
        num_workers=int(num),
        min_workers=int(least),
        max_workers=int(most),
        verbose=True,
    )
    print(f"result {result.values}", flush=True)


if __name__ == "__main__":
    main()
