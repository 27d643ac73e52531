"""Speed of `elastic.data.DataLoader` compared with torch's loader, and its effect on the cost of a commit.

The two loaders alternately read an epoch of the same dataset with the same batch size, without and with loader workers.
The ratio of a round is hvd-elastic's samples per second divided by torch's. With ``--shards 8``, hvd-elastic's loader
returns steps of 8 micro-batches of that size, each loaded with its own seed, as for exact training. Then a commit of a
state with the loader is compared with one without it, and the committed bytes are shown, for a small and a large
dataset. Finally torchdata's StatefulDataLoader must continue with another number of ranks, if it is installed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
import warnings
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, DistributedSampler

import elastic
import results_output
from measurements import Mark, ratio, spread

MARK, COMMIT_MS, COMMIT_BYTES = 0.97, 0.5, 4096
BATCH = 32


class Images(torch.utils.data.Dataset[Any]):
    """A dataset of 3 x 32 x 32 floats, where each sample takes ``us`` microseconds of work."""

    def __init__(self, length: int, us: float) -> None:
        self.length = length
        self.us = us

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.perf_counter() + self.us * 1e-6
        while time.perf_counter() < until:
            pass
        return torch.full((3, 32, 32), float(index)), index


def samples_per_s(loader: Any, length: int, shards: elastic.Shards | None = None) -> float:
    began = time.perf_counter()
    if shards is None:
        count = sum(len(index) for _, index in loader)
    else:
        count = sum(len(index) for step in loader for _, index in shards.over(step))
    assert count == length
    return length / (time.perf_counter() - began)


def rates(options: argparse.Namespace, table: Table) -> dict[str, Any]:
    found = {}
    for workers in options.workers:
        for us in options.us:
            dataset = Images(options.samples, us)
            same: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
            same["persistent_workers"] = workers > 0
            plain = DataLoader(dataset, **same)
            shards = elastic.Shards(options.shards) if options.shards else None
            if shards is None:
                ours = elastic.data.DataLoader(dataset, **same)
            else:
                del same["batch_size"]
                whole = BATCH * shards.count
                ours = elastic.data.DataLoader(
                    dataset, global_batch_size=whole, shards=shards, **same
                )
            sides: dict[str, Any] = {"ours": (ours, shards), "torch": (plain, None)}
            for loader, cut in sides.values():
                samples_per_s(loader, len(dataset), cut)  # starts workers, warms the caches
            rounds: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(options.rounds):
                for name in sorted(sides, reverse=number % 2 == 1):
                    loader, cut = sides[name]
                    rounds[name].append(samples_per_s(loader, len(dataset), cut))
            paired = ratio(rounds["ours"], rounds["torch"])
            name = f"{workers} loader workers, {us:g} us a sample"
            table.add_row(name, paired.text(), spread(rounds["torch"]).text(0))
            found[name] = {"ratio": paired.median, **rounds}
    return found


def commits(table: Table) -> dict[str, Any]:
    found = {}
    for length in (1_000, 10_000_000):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        loader = elastic.data.DataLoader(range(length), batch_size=32)
        without = elastic.TorchState(optimizer=optimizer, step=0)
        state = elastic.TorchState(optimizer=optimizer, loader=loader, step=0)
        took: dict[str, list[float]] = {"with": [], "without": []}
        for number, _ in zip(range(300), loader, strict=False):
            weight.grad = torch.ones(1)
            optimizer.step()
            for name in sorted(took, reverse=number % 2 == 1):
                began = time.perf_counter()
                (state if name == "with" else without).commit()
                took[name].append((time.perf_counter() - began) * 1e3)
        more = spread([a - b for a, b in zip(took["with"], took["without"], strict=True)])
        size = len(pickle.dumps(loader.state_dict()))
        table.add_row(f"{length:,} samples", f"{more.text(3)} ms", f"{size} bytes")
        found[str(length)] = {"added_ms": more.median, "bytes": size}
    return found


def stateful(console: Console) -> dict[str, Any]:
    """Read half an epoch with two ranks and the rest with three, and count how often each sample is read."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        console.print(
            "skipped StatefulDataLoader, because torchdata is not installed: run pip install torchdata"
        )
        return {}
    length, batch = 120, 5

    def make(rank: int, size: int) -> Any:
        numbers: Any = range(length)
        sampler: Any = DistributedSampler(numbers, num_replicas=size, rank=rank, shuffle=False)
        return StatefulDataLoader(numbers, batch, sampler=sampler)

    seen: Counter[int] = Counter()
    states = []
    for rank in range(2):
        loader = make(rank, 2)
        for _, samples in zip(range(6), loader, strict=False):
            seen.update(samples.tolist())
        states.append(loader.state_dict())
    for rank in range(3):
        loader = make(rank, 3)
        loader.load_state_dict(states[min(rank, 1)])  # there is no state for the third rank
        for samples in loader:
            seen.update(samples.tolist())
    missed = sum(seen[number] == 0 for number in range(length))
    twice = sum(seen[number] > 1 for number in range(length))
    console.print(
        f"StatefulDataLoader, {length} samples, 2 ranks for half an epoch and 3 for the rest: {missed} samples"
        f" skipped, {twice} repeated"
    )
    return {"missed": missed, "twice": twice}


def marks_of(figures: dict[str, Any]) -> list[Mark]:
    marks = [
        Mark(f"{name}, of torch's rate", MARK, found["ratio"], at_least=True)
        for name, found in figures["rates"].items()
    ]
    for length, found in figures["commits"].items():
        marks.append(Mark(f"{length} samples, ms more for a commit", COMMIT_MS, found["added_ms"]))
        marks.append(Mark(f"{length} samples, bytes of a commit", COMMIT_BYTES, found["bytes"]))
    return marks


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--us", type=float, nargs="*", default=[0.0, 100.0])
    parser.add_argument("--shards", type=int, default=0, help="of a step; 0: no shards")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    console = results_output.console()
    load = os.getloadavg()[0]
    title = f"samples per second, {options.rounds} rounds (load {load:.0f})"
    table = results_output.table(title, "", "ours / torch", "torch, samples/s")
    figures: dict[str, Any] = {"rates": rates(options, table)}
    console.print(table)
    table = results_output.table("what the loader adds to a commit", "", "time", "state")
    figures["commits"] = commits(table)
    console.print(table)
    figures["stateful"] = stateful(console)
    results_output.conclude(console, options.json, figures, marks_of(figures))


if __name__ == "__main__":
    main()
