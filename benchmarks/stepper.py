"""The job that the recovery and join benchmarks disturb: small steps, a commit after each, one line
per step. It ends at the step whose number stands in ``DIR/stop``, which all ranks have to see before they come to it.

Each worker appends ``time generation size rank step`` to ``DIR/<pid>.steps``, and to ``DIR/<pid>.entries`` when its
training function is called; the time is CLOCK_MONOTONIC in seconds, which is one clock for all processes of a machine.
``DIR/<pid>.ready`` has the time when it was ready to train.
At the end it writes a digest of its weights to ``DIR/<pid>.weights``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import elastic
from elastic.runtime import lifecycle
from elastic.state.snapshots.digest import digest


class StepLog:
    """Of this process."""

    def __init__(self, directory: str) -> None:
        self._weights, self._ready = (
            Path(directory, f"{os.getpid()}.{kind}") for kind in ("weights", "ready")
        )
        self._steps, self._entries = (
            os.open(f"{directory}/{os.getpid()}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for kind in ("steps", "entries")
        )

    def ready(self) -> None:
        self._ready.write_text(str(time.monotonic()))

    def entered(self, step: int) -> None:
        self._write(self._entries, step)

    def made(self, step: int) -> None:
        self._write(self._steps, step)

    def ended(self, weights: Iterable[Any]) -> None:
        """``weights``: tensors, or arrays of NumPy."""
        tensors = (torch.as_tensor(each).detach() for each in weights)
        self._weights.write_text(str(digest((str(n), each) for n, each in enumerate(tensors))))

    def _write(self, file: int, step: int) -> None:
        rt = lifecycle.current()
        line = f"{time.monotonic():.6f} {rt.generation} {rt.place.size} {rt.place.rank} {step}\n"
        os.write(file, line.encode())


def main(directory: str, steps: int, width: int, ddp: bool) -> None:
    torch.set_num_threads(1)
    elastic.init()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    if ddp:
        torch.distributed.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = elastic.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters()
        )
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    stop = Path(directory, "stop")
    log = StepLog(directory)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        log.entered(state.step)
        last = steps
        while state.step < last:
            if last == steps and stop.exists():
                last = int(stop.read_text())
                continue
            generator = torch.Generator().manual_seed(state.step * 1000 + elastic.rank())
            inputs = torch.randn(16, 64, generator=generator)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            state.step += 1
            log.made(state.step)
            state.commit()

    log.ready()
    train(state)
    log.ended(model.parameters())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["ddp"])
