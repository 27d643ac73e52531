"""What does a commit cost? State.commit() of an MLP with momentum beside a plain copy of the same bytes, in pairs.

The plain copy is ``copy_`` into buffers made once, tensor by tensor. Between two measured commits a training step runs,
so that everything has changed; then a second commit with no work in between is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import elastic


def ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=2240)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(options.layers):
        layers += [torch.nn.Linear(options.width, options.width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    inputs = torch.randn(8, options.width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    state = elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    state.commit()
    live = [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    live = [tensor.detach() for tensor in live]
    buffers = [torch.empty_like(tensor) for tensor in live]
    size = sum(tensor.numel() * tensor.element_size() for tensor in live)

    def plain() -> None:
        for buffer, tensor in zip(buffers, live, strict=True):
            buffer.copy_(tensor)

    plain()
    commits, plains, again = [], [], []
    for number in range(options.rounds):
        step()
        # In turn, so that neither always finds the caches warm.
        if number % 2:
            plains.append(ms(plain))
            commits.append(ms(state.commit))
        else:
            commits.append(ms(state.commit))
            plains.append(ms(plain))
        again.append(ms(state.commit))
    ratios = [c / p for c, p in zip(commits, plains, strict=True)]
    table = Table(title=f"commit of {size / 1e6:.0f} MB, {options.rounds} pairs")
    table.add_column("")
    for column in ("min", "median", "max"):
        table.add_column(column, justify="right")
    for name, values, digits in (
        ("commit(), ms", commits, 1),
        ("plain copy, ms", plains, 1),
        ("ratio, pair by pair", ratios, 2),
        ("second commit(), no work between, ms", again, 3),
    ):
        row = (min(values), statistics.median(values), max(values))
        table.add_row(name, *(f"{value:.{digits}f}" for value in row))
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"commit_ms": commits, "plain_ms": plains, "again_ms": again}, file)


if __name__ == "__main__":
    main()
