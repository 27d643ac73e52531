"""Host time per parameter in a step, compared with torch's DistributedDataParallel in alternating rounds.

    python benchmarks/hooks.py [--parameters 1000] [--elements 16] [--rounds 60]

One process in a world of two, whose other rank is simulated and whose collectives end immediately, is compared with DDP
on one rank. What remains is the host's work per parameter during and after backward. It measures the training thread's
CPU time, minus that of a step without any reduction. "A hook alone" is an empty Python function that is called for
every parameter: the minimum with hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import results_output
import tests_on_path  # noqa: F401
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.runtime import lifecycle
from harness.small_worlds import World
from measurements import order, ratio, spread


class Many(torch.nn.Module):
    """A model of parameters only: each gets its gradient in one small step of backward."""

    def __init__(self, parameters: int, elements: int) -> None:
        super().__init__()
        self.many = torch.nn.ParameterList(torch.zeros(elements) for _ in range(parameters))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.many)).sum()


def alone(model: Many) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()

    return step


def hooked(model: Many) -> Callable[[], None]:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    return alone(model)


def ours(model: Many) -> Callable[[], None]:
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.synchronize()

    return step


def ddp(model: Many) -> Callable[[], None]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        wrapped().backward()

    return step


WAYS = {"alone": alone, "a hook alone": hooked, "ours": ours, "torch DDP": ddp}


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World(2)
    setattr(lifecycle, "current", lambda **_: world)  # noqa: B010 - typed otherwise
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    steps = {name: way(Many(options.parameters, options.elements)) for name, way in WAYS.items()}
    took: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 10):
        for name in order(list(steps), turn):
            began = time.thread_time()
            steps[name]()
            if turn >= 10:
                took[name].append(time.thread_time() - began)
    title = f"{options.parameters} parameters of {options.elements} elements"
    headings = ("", "us for each parameter", "least", "a step, beside DDP's")
    table, found = results_output.table(title, *headings), {}
    for name, times in took.items():
        more = [
            (a - b) / options.parameters * 1e6 for a, b in zip(times, took["alone"], strict=True)
        ]
        least = (min(times) - min(took["alone"])) / options.parameters * 1e6
        found[name] = (spread(more), least, ratio(times, took["torch DDP"]))
        table.add_row(name, spread(more).text(), f"{least:.2f}", found[name][2].text())
    results_output.console().print(table)
    results_output.write_json(options.json, found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
