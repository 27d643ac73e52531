"""Cost of a timeline for a training step: the same processes train with and without a timeline, in alternating blocks.

    python benchmarks/timeline.py [--workers 2] [--pairs 40] [--steps 100] [--tensors 1] [--json FILE]

The model is small (784 - 128 - 10, a batch of 64), so that a step takes milliseconds; each step also averages
``--tensors`` numbers by name, as scripts do with their metrics. A block is ``--steps`` steps; one of each pair of
blocks is recorded, in alternating order. The result is the ratio of the slowest worker's times within a pair, which is
much more stable on a shared machine than either time. If other processes use the cores, the ratio of the CPU time of
all workers is even more stable. It includes their sending threads, but not the driver, which writes the file. The
quickest blocks of each kind are those without other load.

Starting and ending a timeline is not measured; sending and writing, which run during the training on the same cores,
are included.

Results with 2 workers on 2 cores with other load, 120 pairs of 80 steps: steps of 4.9 ms, ratio of pairs 0.989
(quartiles 0.848 .. 1.157), of CPU time 1.000 (0.925 .. 1.093), of the quickest tenth 1.010; 18 records of 89 bytes a
step. Blocks of 40 steps gave 1.019, 1.047 and 1.036 when the comparison of clocks was still included.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

import elastic
import results_output

WARMUP = 2  # pairs
SETTLE_S = 0.05  # pause before each block: a timeline begins with a comparison of clocks


@dataclass(frozen=True)
class Answer:
    off_ms: float  # milliseconds of a step, medians over the blocks
    on_ms: float
    ratio: float  # median of on / off over the pairs
    low: float  # its quartiles
    high: float
    quiet_ratio: float  # ratio on / off of the quickest tenth of the blocks of each kind
    cpu_ratio: float  # median over the pairs of the workers' CPU time
    cpu_low: float
    cpu_high: float
    records_per_step: float  # records of all workers
    bytes_per_record: float


def train(pairs: int, steps: int, tensors: int, path: str) -> dict[str, list[Any]]:
    """Return (seconds, CPU seconds) of each block, by pair; and size and number of records of each file."""
    import torch

    torch.set_num_threads(1)
    elastic.init()
    torch.manual_seed(elastic.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs, targets = torch.randn(64, 784), torch.randint(10, (64,))

    def block() -> tuple[float, float]:
        time.sleep(SETTLE_S)
        elastic.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            handles = [
                elastic.allreduce_async(loss.detach().reshape(1), name=f"metric {number}")
                for number in range(tensors)
            ]
            for handle in handles:
                elastic.synchronize(handle)
        return time.perf_counter() - began, time.process_time() - used

    def recorded() -> tuple[float, float]:
        elastic.start_timeline(path)
        elastic.barrier()
        seconds = block()
        elastic.barrier()
        elastic.stop_timeline()
        return seconds

    times: dict[str, list[Any]] = {"off": [], "on": [], "files": []}
    for pair in range(-WARMUP, pairs):
        for kind in ("off", "on") if pair % 2 else ("on", "off"):
            seconds = recorded() if kind == "on" else block()
            if pair >= 0:
                times[kind].append(seconds)
        elastic.barrier()
        if pair >= 0 and elastic.rank() == 0:
            text = Path(path).read_text()
            times["files"].append((len(text), sum(e["ph"] != "M" for e in json.loads(text))))
        elastic.barrier()
    return times


def measure(workers: int, pairs: int, steps: int, tensors: int) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/timeline.json"
        found = elastic.launch(
            train, (pairs, steps, tensors, path), np=workers, log_level="WARNING"
        )
    off, off_cpu = _blocks([times["off"] for times in found])
    on, on_cpu = _blocks([times["on"] for times in found])
    low, middle, high = _quartiles(on, off)
    cpu_low, cpu_middle, cpu_high = _quartiles(on_cpu, off_cpu)
    size, records = (sum(column) for column in zip(*found[0]["files"], strict=True))
    per_step = 1e3 / steps
    return Answer(
        off_ms=statistics.median(off) * per_step,
        on_ms=statistics.median(on) * per_step,
        ratio=middle,
        low=low,
        high=high,
        quiet_ratio=_quickest(on) / _quickest(off),
        cpu_ratio=cpu_middle,
        cpu_low=cpu_low,
        cpu_high=cpu_high,
        records_per_step=records / (pairs * steps),
        bytes_per_record=size / records,
    )


def _blocks(of_workers: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Return the slowest worker's seconds and all workers' CPU seconds of each block."""
    blocks = list(zip(*of_workers, strict=True))
    slowest = [max(seconds for seconds, _ in block) for block in blocks]
    return slowest, [sum(cpu for _, cpu in block) for block in blocks]


def _quickest(blocks: list[float]) -> float:
    """Return the mean of the quickest tenth: the blocks without other load."""
    return statistics.fmean(sorted(blocks)[: max(1, len(blocks) // 10)])


def _quartiles(on: list[float], off: list[float]) -> list[float]:
    return statistics.quantiles([a / b for a, b in zip(on, off, strict=True)], n=4)


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=100, help="in a block")
    parser.add_argument("--tensors", type=int, default=1, help="averaged by name in each step")
    flags = vars(parser.parse_args())
    report = flags.pop("json")
    answer = measure(**flags)
    table = Table(show_header=False)
    table.add_row("workers, tensors by name", f"{flags['workers']}, {flags['tensors']}")
    table.add_row("pairs of blocks, steps in each", f"{flags['pairs']}, {flags['steps']}")
    table.add_row("step without", f"{answer.off_ms:.2f} ms")
    table.add_row("step with", f"{answer.on_ms:.2f} ms")
    quartiles = f"quartiles {answer.low:.3f} .. {answer.high:.3f}"
    table.add_row("ratio of pairs", f"{answer.ratio:.3f}, {quartiles}")
    quartiles = f"quartiles {answer.cpu_low:.3f} .. {answer.cpu_high:.3f}"
    table.add_row("... of processor time", f"{answer.cpu_ratio:.3f}, {quartiles}")
    table.add_row("ratio of the quickest tenth", f"{answer.quiet_ratio:.3f}")
    records = f"{answer.records_per_step:.0f} of {answer.bytes_per_record:.0f} bytes"
    table.add_row("records a step", records)
    results_output.console().print(table)
    results_output.write_json(report, {"question": flags, "answer": answer})


if __name__ == "__main__":
    main()
