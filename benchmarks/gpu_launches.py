"""GPU work of a step, compared with torch's DistributedDataParallel, counted on the fake CUDA runtime.

    python tests/harness/fake_cuda/start.py 2 python benchmarks/gpu_launches.py [--parameters 100] [--json FILE]
    python tests/harness/fake_cuda/start.py 4 python benchmarks/gpu_launches.py --fsdp 4 [--json FILE]

With --fsdp, the whole step of a model with that many layers, each sharded by FSDP2, is counted with the process group
of this package and with torch's NCCL; so is one with ZeroRedundancyOptimizer. "ahead" is whether the host has queued
the whole step while the GPU has not begun with it.

A count is that of a step with reduction minus that of one without, of one rank of two. The counts are those of a real
GPU; launches of operators on many tensors are counted as torch's multi_tensor_apply would split them. The host's time
differs from that on a machine with GPUs, where a launch has a different cost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from torch import distributed
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import elastic
import groups
import results_output
from elastic.torch_backend import registration
from hooks import Many, alone, ours

STEPS = 5
BUSY_NS = 3_000_000_000
SHOWN = (
    *("launches", "launched_bytes", "collectives", "synchronizations", "events", "stream_waits"),
    *("copies", "allocations", "queries", "ahead", "host_us"),
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


def linears(layers: int, elements: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    width = round(elements**0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).cuda()


def stepping(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, elements: int, clipped: bool = False
) -> Callable[[], None]:
    inputs = torch.randn(8, round(elements**0.5), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def fully_sharded(
    layers: int, elements: int, way: str, group: Any, backend: str
) -> Callable[[], None]:
    """Return a step of a model of square layers, with AdamW."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if way == "FSDP2, replicas":
        half = distributed.get_world_size() // 2
        override: dict[Any, Any] = {0: backend, 1: backend}
        mesh = init_device_mesh(
            "cuda", (2, half), mesh_dim_names=("replicas", "shards"), backend_override=override
        )
    else:
        mesh = DeviceMesh.from_group(group, "cuda")
    half_precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policy = half_precision if way == "FSDP2, bfloat16" else MixedPrecisionPolicy()
    model = linears(layers, elements)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return stepping(model, optimizer, elements, clipped=way == "FSDP2, clipped")


def divided(layers: int, elements: int, group: Any) -> Callable[[], None]:
    """Return a step with ZeroRedundancyOptimizer, without the reduction of gradients."""
    model = linears(layers, elements)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
    )
    return stepping(model, optimizer, elements)


SHARDED = ("FSDP2", "FSDP2, clipped", "FSDP2, bfloat16", "FSDP2, replicas", "ZeRO")


def sharded(layers: int, elements: int, way: str, backend: str) -> Callable[[], None]:
    group: Any = distributed.new_group(backend=backend)
    if way == "ZeRO":
        return divided(layers, elements, group)
    return fully_sharded(layers, elements, way, group, backend)


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
    """Return the counts of a whole step, by way, backend and count."""
    torch.cuda.set_device(distributed.get_rank())
    registration.register()

    @elastic.run
    def train(state: elastic.ObjectState) -> dict[str, dict[str, float]]:
        ways = {
            f"{way}: {backend}": functools.partial(sharded, layers, elements, way, backend)
            for way in SHARDED
            for backend in ("elastic", "nccl")
        }
        return counts_of(ways)

    return train(elastic.ObjectState())


def counts_of(ways: Mapping[str, Callable[[], Callable[[], None]]]) -> dict[str, dict[str, float]]:
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
        found[name] = counts | {"host_us": took_us / STEPS, "ahead": float(ahead(step))}
    return found


def ahead(step: Callable[[], None]) -> bool:
    """Return whether the host queues a whole step without waiting for the GPU, which is busy."""
    torch.cuda._sleep(BUSY_NS)
    begins = torch.cuda.Event()
    begins.record()
    step()
    waits = not begins.query()
    torch.cuda.synchronize()
    return waits


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--fsdp", type=int, metavar="LAYERS", help="count a step of FSDP2 instead")
    parser.add_argument("--ranks", type=int, default=4, help="of --fsdp; an even number")
    asked = parser.parse_args()
    figures = {}
    if asked.fsdp:
        found = groups.ask(counted_sharded, asked.ranks, asked.fsdp, asked.elements)
        table = results_output.table(f"{asked.fsdp} layers of {asked.elements} weights", "", *SHOWN)
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
