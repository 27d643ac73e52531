"""GPU work of a step, compared with torch's DistributedDataParallel, counted on the fake CUDA runtime.

    python tests/harness/fake_cuda/start.py 2 python benchmarks/gpu_launches.py [--parameters 100] [--json FILE]
    python tests/harness/fake_cuda/start.py 2 python benchmarks/gpu_launches.py --fsdp 4 [--json FILE]

With --fsdp, the whole step of a model with that many layers, each sharded by FSDP2, is counted with the process group
of this package and with torch's NCCL.

A count is that of a step with reduction minus that of one without, of one rank of two. The counts are those of a real
GPU; launches of operators on many tensors are counted as torch's multi_tensor_apply would split them. The host's time
differs from that on a machine with GPUs, where a launch has a different cost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import groups
import results_output
from elastic.torch_backend import registration
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


def fully_sharded(layers: int, elements: int, backend: str) -> Callable[[], None]:
    """Return a step of a model of square layers, with AdamW."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    registration.register()
    group: Any = distributed.new_group(backend=backend)
    mesh = DeviceMesh.from_group(group, "cuda")
    torch.manual_seed(0)
    width = round(elements**0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, width, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def counted(parameters: int, elements: int) -> dict[str, dict[str, float]]:
    """Return the counts of a step, by variant and count."""
    torch.cuda.set_device(distributed.get_rank())
    return counts_of(
        {
            name: functools.partial(way, Many(parameters, elements).cuda())
            for name, way in WAYS.items()
        }
    )


def counted_sharded(layers: int, elements: int) -> dict[str, dict[str, float]]:
    """Return the counts of a whole step, by backend and count."""
    torch.cuda.set_device(distributed.get_rank())
    return counts_of(
        {
            backend: functools.partial(fully_sharded, layers, elements, backend)
            for backend in ("elastic", "nccl")
        }
    )


def counts_of(ways: dict[str, Callable[[], Callable[[], None]]]) -> dict[str, dict[str, float]]:
    import fake_cuda  # type: ignore[import-not-found]  # on the path of a process that start.py starts

    found = {}
    for name, way in ways.items():
        step = way()
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
    parser = results_output.options_of(__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--fsdp", type=int, metavar="LAYERS", help="count a step of FSDP2 instead")
    asked = parser.parse_args()
    figures = {}
    if asked.fsdp:
        found = groups.ask(counted_sharded, 2, asked.fsdp, asked.elements)
        table = results_output.table(
            f"FSDP2, {asked.fsdp} layers of {asked.elements} weights", "", *SHOWN
        )
        for name, counts in found.items():
            table.add_row(name, *(f"{counts[each]:.4g}" for each in SHOWN))
        Console(width=200).print(table)
        results_output.write_json(asked.json, found)
        return
    for parameters in asked.parameters:
        found = groups.ask(counted, 2, parameters, asked.elements)
        title = f"{parameters} parameters of {asked.elements} elements"
        table = results_output.table(title, "", *SHOWN)
        without = found.pop("alone")
        figures[str(parameters)] = {
            name: {each: counts[each] - without[each] for each in SHOWN}
            for name, counts in found.items()
        }
        for name, counts in figures[str(parameters)].items():
            table.add_row(name, *(f"{counts[each]:.4g}" for each in SHOWN))
        Console(width=200).print(table)
    results_output.write_json(asked.json, figures)


if __name__ == "__main__":
    main()
