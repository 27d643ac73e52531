"""Cost of durable commits for training: an MLP with Adam that commits each step, in alternating blocks.

    plain      commits in memory only
    durable    each tenth commit is also written to disk: ELASTIC_CHECKPOINT_DIR
    async      plain, and torch.distributed.checkpoint.async_save of the same state each tenth step

The stall is the longest step of a block minus its median. The benchmark has one process and writes to --folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

import elastic
import results_output
from models import linear_layers

KINDS = ("plain", "durable", "async")
WRITTEN_S = 2.0  # time to write the first checkpoint


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=2240)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60, help="of a block")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to be measured (default: TMPDIR)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-checkpoint-", dir=options.folder))
    try:
        figures = measured(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = results_output.table(
        f"{figures['parameters'] / 1e6:.1f} M parameters, Adam; each {options.every}th step",
        *("", "step, median", "step, mean", "x plain, rounds", "mean", "stall", "checkpoints"),
    )
    for kind in KINDS:
        row = figures[kind]
        table.add_row(
            kind,
            f"{row['median_ms']:.1f} ms",
            f"{row['mean_ms']:.1f} ms",
            f"{row['ratio']:.3f} ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})",
            f"{row['mean_ratio']:.3f}",
            f"{row['stall_ms']:.0f} ms",
            str(row["checkpoints"]),
        )
    results_output.console().print(table)
    results_output.write_json(options.json, figures)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*linear_layers(options.layers, options.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    inputs = torch.randn(options.batch, options.width)
    elastic.init()
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    os.environ["ELASTIC_CHECKPOINT_EVERY"] = f"{options.every}commits"
    os.environ["ELASTIC_CHECKPOINT_KEEP"] = "100"

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        return (time.perf_counter() - began) * 1e3

    @elastic.run
    def plain(state: Any) -> list[float]:
        step()  # the first commit of a training is always made durable
        time.sleep(WRITTEN_S)
        return [step() for _ in range(options.steps)]

    @elastic.run
    def beside(state: Any, name: str) -> list[float]:
        times: list[float] = []
        saving: Any = None
        step()
        time.sleep(WRITTEN_S)
        for number in range(1, options.steps + 1):
            began = time.perf_counter()
            step()
            if number % options.every == 0 and (saving is None or saving.done()):
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saving = async_save(
                    saved, checkpoint_id=folder / "async" / f"{name}-{number}", no_dist=True
                )
                made["async"] += 1
            times.append((time.perf_counter() - began) * 1e3)
        if saving is not None:
            saving.result()
        return times

    made = dict.fromkeys(KINDS, 0)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    stalls: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    plain(state)  # allocates buffers, starts threads
    for number in range(options.rounds):
        means: dict[str, float] = {}
        # each kind is the first one in turn
        for kind in (KINDS * 2)[number % len(KINDS) :][: len(KINDS)]:
            if kind == "durable":
                os.environ["ELASTIC_CHECKPOINT_DIR"] = str(folder / f"durable-{number}")
            block = beside(state, str(number)) if kind == "async" else plain(state)
            if os.environ.pop("ELASTIC_CHECKPOINT_DIR", None):
                made["durable"] += len([*(folder / f"durable-{number}").glob("r*/manifest.json")])
                shutil.rmtree(folder / f"durable-{number}")
            shutil.rmtree(folder / "async", ignore_errors=True)
            times[kind] += block
            stalls[kind].append(max(block) - statistics.median(block))
            means[kind] = statistics.fmean(block)
        for kind in KINDS:
            ratios[kind].append(means[kind] / means["plain"])
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for kind in KINDS:
        figures[kind] = {
            "median_ms": statistics.median(times[kind]),
            "mean_ms": statistics.fmean(times[kind]),
            "ratio": statistics.median(ratios[kind]),
            "ratios": ratios[kind],
            "mean_ratio": statistics.fmean(times[kind]) / statistics.fmean(times["plain"]),
            "stall_ms": statistics.median(stalls[kind]),
            "checkpoints": made[kind],
        }
    return figures


if __name__ == "__main__":
    main()
