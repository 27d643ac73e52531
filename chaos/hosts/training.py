"""What hosts and the soak train: a small model, a commit after every step, until a file exists. Workers write down
their steps.

The notes are lines ``seconds kind step size``, by this machine's monotonic clock, in a file for each process; `steps`
reads them. They are the workers' own word, and go on where no driver is there to keep a journal. A process that comes
back to a step before one that it had committed says so, and fails. Imports are cheap, because it's started often.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch

import elastic
from elastic.chaos.hosts.workers.no_compile import without_compiler

STEP_S = 0.04  # besides the work, so that two cores have room for many hosts
WIDTH = 32
BATCH = 16


class Notes:
    """One line at a time, in the file when the call returns."""

    def __init__(self, folder: Path) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / name, flags, 0o600)

    def write(self, kind: str, step: int) -> None:
        line = f"{time.monotonic():.6f} {kind} {step} {elastic.size()}\n"
        os.write(self._file, line.encode())


def main(folder: str, width: int = WIDTH, step_s: float = STEP_S) -> None:
    """``folder`` takes the notes, in steps/; the file ``over`` in it ends the training. ``width``: of two layers."""
    without_compiler()
    torch.set_num_threads(1)
    over = Path(folder) / "over"
    notes = Notes(Path(folder) / "steps")
    elastic.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    )
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    committed = 0

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        nonlocal committed
        notes.write("entered", state.step)
        if state.step < committed:
            raise AssertionError(f"back at step {state.step}, after step {committed} was committed")
        while True:
            notes.write("began", state.step + 1)
            # One looks, all hear: they end at the same step.
            found = torch.tensor([float(elastic.rank() == 0 and over.exists())])
            if elastic.allreduce(found, op=elastic.Max, name="over").item():
                return
            dice = torch.Generator().manual_seed(state.step * 64 + elastic.rank())
            batch = torch.randn(BATCH, width, generator=dice)
            optimizer.zero_grad()
            (model(batch) - batch.flip(1)).square().mean().backward()
            optimizer.step()
            state.step += 1
            time.sleep(step_s)
            state.commit()
            committed = state.step
            notes.write("committed", state.step)

    train(elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    folder, width, step_s, *_ = [*sys.argv[1:], WIDTH, STEP_S]
    main(str(folder), int(width), float(step_s))
