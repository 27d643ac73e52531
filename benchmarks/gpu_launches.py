"""What does a step ask of a GPU? Beside torch's DistributedDataParallel, counted on the made-up CUDA runtime.

    python tests/harness/fake_cuda/start.py 2 python benchmarks/gpu_launches.py [--parameters 100] [--json FILE]

A count is that of a step with reduction less that of one without, of one rank of two. The counts are those that a GPU
would see; launches of operators on many tensors are counted as torch's multi_tensor_apply would split them. The host's
time is not a GPU machine's: a launch costs another amount there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import groups
import shown
from hooks import Many, alone, ours

STEPS = 5
SHOWN = (
    *("launches", "launched_bytes", "collectives", "synchronizations", "events", "stream_waits"),
    *("copies", "allocations", "queries", "host_us"),
)


def ddp(model: Many, views: bool) -> Callable[[], None]:
    wrapped = DistributedDataParallel(
        model, process_group=distributed.new_group(backend="nccl"), gradient_as_bucket_view=views
    )

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        wrapped().backward()

    return step


WAYS: dict[str, Callable[[Many], Callable[[], None]]] = {
    "DistributedOptimizer": ours,
    "DDP": lambda model: ddp(model, views=False),
    "DDP, gradient_as_bucket_view": lambda model: ddp(model, views=True),
    "alone": alone,
}


def counted(parameters: int, elements: int) -> dict[str, dict[str, float]]:
    """By way and count, of a step."""
    import fake_cuda  # type: ignore[import-not-found]  # on the path of a process that start.py starts

    torch.cuda.set_device(distributed.get_rank())
    found = {}
    for name, way in WAYS.items():
        step = way(Many(parameters, elements).cuda())
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        before, began = fake_cuda.counts(), time.perf_counter()
        for _ in range(STEPS):
            step()
        took_us = (time.perf_counter() - began) * 1e6
        after = fake_cuda.counts()
        torch.cuda.synchronize()
        counts: dict[str, Any] = {each: (after[each] - before[each]) / STEPS for each in after}
        found[name] = counts | {"host_us": took_us / STEPS}
    return found


def main() -> None:
    parser = shown.options_of(__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--elements", type=int, default=4096)
    asked = parser.parse_args()
    figures = {}
    for parameters in asked.parameters:
        found = groups.ask(counted, 2, parameters, asked.elements)
        title = f"{parameters} parameters of {asked.elements} elements"
        table = shown.table(title, "", *SHOWN)
        without = found.pop("alone")
        figures[str(parameters)] = {
            name: {each: counts[each] - without[each] for each in SHOWN}
            for name, counts in found.items()
        }
        for name, counts in figures[str(parameters)].items():
            table.add_row(name, *(f"{counts[each]:.4g}" for each in SHOWN))
        Console(width=200).print(table)
    shown.write_json(asked.json, figures)


if __name__ == "__main__":
    main()
