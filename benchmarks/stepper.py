"""The job of the recovery and join benchmarks: small steps, a commit after each, one line per step.

It ends at the step whose number is in ``DIR/stop``, which all ranks must read before they reach it. Each worker appends
``time generation size rank step`` to ``DIR/<pid>.steps``, and to ``DIR/<pid>.entries`` when its training function is
called; the time is CLOCK_MONOTONIC in seconds, which is one clock for all processes of a machine. ``DIR/<pid>.ready``
has the time when it was ready to train.

At the end it writes a digest of its weights to ``DIR/<pid>.weights``; with fsdp or zero also the cost of its commits,
and of a plain copy of its shard, to ``DIR/<pid>.costs``.
"""

from __future__ import annotations

import json
import os
import statistics
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
    """Step log of this process."""

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
        """Write the digest of the weights: tensors, or arrays of NumPy."""
        tensors = (torch.as_tensor(each).detach() for each in weights)
        self._weights.write_text(str(digest((str(n), each) for n, each in enumerate(tensors))))

    def _write(self, file: int, step: int) -> None:
        rt = lifecycle.current()
        line = f"{time.monotonic():.6f} {rt.generation} {rt.place.size} {rt.place.rank} {step}\n"
        os.write(file, line.encode())


class Costs:
    """Milliseconds of the last commits of a sharded state, and of as many plain copies of the shard."""

    def __init__(self, state: Any) -> None:
        self._commits = state._sharded
        self._kept: list[Any] = []
        self._received: list[int] = []  # bytes from other workers, by change of the world

    def note(self) -> None:
        self._kept = [*self._kept[-199:], self._commits.spent]
        placed = self._commits.placed
        if placed is not None and self._received[-1:] != [placed.received]:
            self._received.append(placed.received)

    def of_copies(self) -> float:
        shards = [each.local for each in self._commits._live().values()]
        copies = [torch.zeros_like(each) for each in shards]
        times = []
        for _ in range(10):
            began = time.perf_counter()
            if shards:
                with torch.no_grad():
                    torch._foreach_copy_(copies, shards)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def text(self) -> str:
        def median(name: str) -> float:
            return float(statistics.median(getattr(each, name) for each in self._kept))

        found = {name: 1e3 * median(name) for name in ("copy_s", "mirror_s", "seal_s")}
        found |= {name: median(name) for name in ("nbytes", "sent")}
        return json.dumps(found | {"plain_s": 1e3 * self.of_copies(), "received": self._received})


def fully_sharded(width: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    return fully_shard(model)


def main(directory: str, steps: int, width: int, way: str) -> None:
    torch.set_num_threads(1)
    elastic.init()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    if way == "fsdp":
        model = fully_sharded(width)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer: Any = torch.optim.SGD(model.parameters(), **options)
    if way in ("ddp", "zero"):
        torch.distributed.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    if way == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    elif not way:
        optimizer = elastic.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters()
        )
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    stop = Path(directory, "stop")
    log = StepLog(directory)
    costs = Costs(state) if way in ("fsdp", "zero") else None

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
            if costs is not None:
                costs.note()

    log.ready()
    train(state)
    log.ended(getattr(each, "full_tensor", lambda e=each: e)() for each in model.parameters())
    if costs is not None:
        Path(directory, f"{os.getpid()}.costs").write_text(costs.text())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:]))
