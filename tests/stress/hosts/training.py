"""Training script of the hosts and soak tests: a small model, a commit after every step, until a file exists.

Workers write notes of their steps: lines ``seconds kind step size``, on this machine's monotonic clock, in one file per
process; `steps` reads them. They do not depend on a driver and its journal. A process that returns to a step before one
that it had committed reports that, and fails. Imports are cheap, because the script is started often.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from harness.scripts import light  # noqa: F401

# isort: split
import torch

import elastic

STEP_S = 0.04  # pause per step, so that two cores suffice for many hosts
WIDTH = 32
BATCH = 16


class Notes:
    """A file of notes. Each line is in the file when the call returns."""

    def __init__(self, folder: Path) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / name, flags, 0o600)

    def write(self, kind: str, step: int) -> None:
        line = f"{time.monotonic():.6f} {kind} {step} {elastic.size()}\n"
        os.write(self._file, line.encode())


def main(folder: str, width: int = WIDTH, step_s: float = STEP_S) -> None:
    """Train. ``folder`` has the notes, in steps/; the file ``over`` in it ends training. ``width``: of both layers."""
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
            # Rank 0 checks, and all end at the same step.
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
