"""What does it cost that collectives match by name? Small allreduces beside plain torch.distributed, in one run.

    python benchmarks/negotiation.py [--workers 2] [--rounds 30] [--json FILE]

A round submits N tensors and waits for all of them, once with names (``hvd.allreduce_async_`` of each, then
``hvd.synchronize``) and once plainly (``torch.distributed.all_reduce(async_op=True)`` of each, then ``wait``). Both use
Gloo in the same processes and take turns in alternating order, a barrier before each; the slowest rank's time counts.
The ratio of the two of a round is far steadier on a shared machine than either time. Names stay the same, as in
training, so that after the first round only the cached negotiation is paid for.

Wanted: 1,024 of 1 KB at least 3 times faster than plainly, because they travel fused; one of 1 MB at most 1.2 times
slower. 1,024 of 1 MB are left out: a gigabyte for each kind in each worker, of which bandwidth alone decides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed
from torch.multiprocessing.spawn import spawn

import horovod.torch as hvd
from elastic.chaos.harness.ports import free_port
from elastic.protocol.messages import Address
from elastic.runtime import lifecycle

KB, MB = 1 << 10, 1 << 20
CASES = [(1, KB), (64, KB), (1024, KB), (1, MB), (64, MB)]
WARMUP = 3
SINGLE_SHARE = 5  # rounds of one tensor are so many times more: a millisecond is easily disturbed
LARGE_SHARE = 4  # rounds of 64 MB are so many times fewer
FASTER, SLOWER = 3.0, 1.2  # the marks


@dataclass(frozen=True)
class Answer:
    tensors: int
    bytes_each: int
    plain_ms: float  # medians
    named_ms: float
    ratio: float  # median of named / plain over the rounds
    low: float  # its quartiles
    high: float


def named(tensors: list[torch.Tensor], case: str) -> Callable[[], None]:
    names = [f"{case}.{number}" for number in range(len(tensors))]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def plain(tensors: list[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()

    return step


def measure(count: int, each: int, rounds: int) -> Answer:
    ours = [torch.zeros(each // 4) for _ in range(count)]
    theirs = [torch.zeros(each // 4) for _ in range(count)]
    steps = [named(ours, f"{count} of {each}"), plain(theirs)]
    times = torch.zeros(rounds, 2)
    for turn in range(-WARMUP, rounds):
        for column in (0, 1) if turn % 2 else (1, 0):
            distributed.barrier()
            began = time.perf_counter()
            steps[column]()
            if turn >= 0:
                times[turn, column] = time.perf_counter() - began
    check(ours, theirs)
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    low, middle, high = statistics.quantiles((times[:, 0] / times[:, 1]).tolist(), n=4)
    named_ms, plain_ms = (times.median(dim=0).values * 1e3).tolist()
    return Answer(count, each, plain_ms, named_ms, middle, low, high)


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Both ways reduce: otherwise the figures mean nothing."""
    for tensors in (ours, theirs):
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + distributed.get_rank())
    named(ours, "check")()
    plain(theirs)()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)


def worker(rank: int, workers: int, rounds: int, ports: tuple[int, int], out: str) -> None:
    torch.set_num_threads(1)
    lifecycle.init_static(rank, workers, Address("127.0.0.1", ports[0]))
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=workers
    )
    answers = [measure(count, each, rounds_of(count, each, rounds)) for count, each in CASES]
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(answer) for answer in answers]))
    distributed.barrier()
    distributed.destroy_process_group()


def ask(workers: int, rounds: int) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="negotiation-") as folder:
        out = Path(folder) / "answers.json"
        ports = (free_port(), free_port())
        spawn(worker, (workers, rounds, ports, str(out)), nprocs=workers)
        return [Answer(**answer) for answer in json.loads(out.read_text())]


def rounds_of(count: int, each: int, rounds: int) -> int:
    if count == 1:
        return rounds * SINGLE_SHARE
    return max(8, rounds // LARGE_SHARE) if count * each > 8 * MB else rounds


def missed(answers: list[Answer]) -> list[str]:
    """The marks that were not met, as sentences."""
    by_case = {(answer.tensors, answer.bytes_each): answer.ratio for answer in answers}
    found = []
    if by_case[1024, KB] > 1 / FASTER:
        faster = 1 / by_case[1024, KB]
        found.append(f"1,024 of 1 KB are {faster:.1f} times faster, wanted: {FASTER:g} times")
    if by_case[1, MB] > SLOWER:
        found.append(
            f"one of 1 MB takes {by_case[1, MB]:.2f} times as long, wanted: {SLOWER:g} at most"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--rounds", type=int, default=40, help="of each kind, for each size")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    answers = ask(options.workers, options.rounds)
    table = Table(
        title=f"allreduce of {options.workers} workers over Gloo, {options.rounds} rounds"
    )
    for heading in ("tensors", "each", "plain, ms", "named, ms", "named / plain", "quartiles"):
        table.add_column(heading, justify="right")
    for answer in answers:
        table.add_row(
            str(answer.tensors),
            "1 KB" if answer.bytes_each == KB else "1 MB",
            f"{answer.plain_ms:.2f}",
            f"{answer.named_ms:.2f}",
            f"{answer.ratio:.2f}",
            f"{answer.low:.2f} .. {answer.high:.2f}",
        )
    console = Console()
    console.print(table)
    marks = missed(answers)
    for sentence in marks or ["both marks are met"]:
        console.print(sentence)
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        machine["torch"] = torch.__version__
        result = {
            "workers": options.workers,
            "rounds": options.rounds,
            "answers": [asdict(answer) for answer in answers],
            "machine": machine,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
