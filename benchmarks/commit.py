"""Cost of a commit: State.commit() of an MLP with momentum compared with a plain copy of the same bytes, in pairs.

The plain copy is ``copy_`` into existing buffers, tensor by tensor. A training step runs between two measured commits,
so that everything has changed; then a second commit without work in between is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import elastic
import results_output
from models import linear_layers


def ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=2240)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*linear_layers(options.layers, options.width))
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
        # In turn, so that the caches are equally warm for both.
        if number % 2:
            plains.append(ms(plain))
            commits.append(ms(state.commit))
        else:
            commits.append(ms(state.commit))
            plains.append(ms(plain))
        again.append(ms(state.commit))
    ratios = [c / p for c, p in zip(commits, plains, strict=True)]
    title = f"commit of {size / 1e6:.0f} MB, {options.rounds} pairs"
    table = results_output.table(title, "", "min", "median", "max")
    for name, values, digits in (
        ("commit(), ms", commits, 1),
        ("plain copy, ms", plains, 1),
        ("ratio, pair by pair", ratios, 2),
        ("second commit(), no work between, ms", again, 3),
    ):
        row = (min(values), statistics.median(values), max(values))
        table.add_row(name, *(f"{value:.{digits}f}" for value in row))
    results_output.console().print(table)
    figures = {"commit_ms": commits, "plain_ms": plains, "again_ms": again}
    results_output.write_json(options.json, figures)


if __name__ == "__main__":
    main()
