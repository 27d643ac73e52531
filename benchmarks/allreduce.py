"""Time of an allreduce between workers of one host, compared with Gloo and with copying the same amount of memory.

    python benchmarks/allreduce.py [--workers 2 4] [--rounds 30] [--sizes-mb 0.0625 1 10 100 256] [--json FILE]

Four variants alternate in the same processes: hvd-elastic's group in place on memory that the workers share;
hvd-elastic's group on an ordinary tensor, which must be copied to shared memory and back; torch's ProcessGroupGloo with
its defaults; and, as the lower bound, concurrent copies of private buffers of the same size, since a reduction must
read every input and write every result at least once.

Small tensors are reduced many times in a row, and the mean is reported. Before the measurement, every variant must
compute a correct sum on every rank. The share of plain copies is their time divided by hvd-elastic's: 1.0 is the limit
of the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from rich.table import Table
from torch import distributed

import groups
import results_output
from elastic.collectives.shared_memory import arena
from measurements import Mark, Spread, ratio, size_text, spread

KB, MB = 1 << 10, 1 << 20
SIZES_MB = (0.0625, 1.0, 10.0, 100.0, 256.0)
IN_A_ROW_BYTES = 8 * MB  # small tensors are repeated until this many bytes are reduced
MOST_IN_A_ROW = 50
TIMES_GLOO = {64 * KB: 2.0, 10 * MB: 8.0, 100 * MB: 6.0}  # limits
SHARE, SHARE_FROM = 0.5, 10 * MB


@dataclass(frozen=True)
class Answer:
    workers: int
    size: int
    carried_by: str  # our group's backend
    shared: bool  # the first variant's memory is shared
    ms: dict[str, Spread]
    times_gloo: Spread  # Gloo's time / ours, by rounds
    share: Spread  # share of plain copies


def measure(sizes: list[int], rounds: int) -> list[Answer]:
    group = groups.ours()
    gloo = torchs()
    answers = []
    for size in sizes:
        shared, in_arena = arena_zeros(size // 4)
        elsewhere, theirs = torch.zeros(size // 4), torch.zeros(size // 4)
        source, target = torch.ones(size // 4), torch.zeros(size // 4)
        reduce, theirs_reduced = groups.sum_with(group), gloo_sum(gloo)
        for way, tensor in (reduce, shared), (reduce, elsewhere), (theirs_reduced, theirs):
            groups.prove(way, tensor)
        ways = {
            "ours": _call(reduce, shared),
            "elsewhere": _call(reduce, elsewhere),
            "gloo": _call(theirs_reduced, theirs),
            "copies": _call(target.copy_, source),
        }
        repeats = max(1, min(MOST_IN_A_ROW, IN_A_ROW_BYTES // size))
        times = groups.take_turns(ways, rounds, repeats=repeats)
        for way, tensor in (reduce, shared), (reduce, elsewhere):
            groups.prove(way, tensor)  # still correct afterwards
        answer = Answer(
            distributed.get_world_size(),
            size,
            groups.named(group),
            in_arena,
            {name: spread(seconds).times(1e3) for name, seconds in times.items()},
            ratio(times["gloo"], times["ours"]),
            ratio(times["copies"], times["ours"]),
        )
        answers.append(answer)
    return answers


def _call(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    def call() -> None:
        function(*arguments)

    return call


def arena_zeros(elements: int) -> tuple[torch.Tensor, bool]:
    """Return zeros, in shared memory if it exists, and whether they are in shared memory."""
    tensor, mine = arena.zeros(elements, torch.float32), arena.mine()
    lies_there = mine is not None and mine.offset_of(tensor.data_ptr(), tensor.nbytes) is not None
    return tensor, lies_there


def torchs() -> Any:
    """Create a ProcessGroupGloo with torch's defaults."""
    c10d: Any = distributed  # the stubs lack functions that this benchmark uses
    rank, size = distributed.get_rank(), distributed.get_world_size()
    store = c10d.PrefixStore("plainly", c10d.distributed_c10d._get_default_store())
    return c10d.ProcessGroupGloo(store, rank, size, timedelta(minutes=5))


def gloo_sum(gloo: Any) -> Callable[[torch.Tensor], None]:
    def reduce(tensor: torch.Tensor) -> None:
        gloo.allreduce([tensor]).wait()

    return reduce


def marks_of(answers: list[Answer]) -> list[Mark]:
    marks = []
    for answer in answers:
        case = f"{size_text(answer.size)}, {answer.workers} workers"
        if (wanted := TIMES_GLOO.get(answer.size)) is not None:
            times = answer.times_gloo.median
            marks.append(Mark(f"{case}, times as fast as Gloo", wanted, times, at_least=True))
        if answer.size >= SHARE_FROM:
            share = answer.share.median
            marks.append(Mark(f"{case}, share of plain copies", SHARE, share, at_least=True))
    return marks


def table(answers: list[Answer], rounds: int) -> Table:
    found = results_output.table(
        f"allreduce of float32 on one host, ms, {rounds} rounds: median (quartiles)",
        *("workers", "size", "carried by", "ours, in place", "ours, from elsewhere"),
        *("Gloo", "plain copies", "x Gloo", "share of copies"),
    )
    for answer in answers:
        digits = 1 if answer.size >= 10 * MB else 3
        ways = ("ours", "elsewhere", "gloo", "copies")
        found.add_row(
            str(answer.workers),
            size_text(answer.size),
            answer.carried_by,
            *(answer.ms[name].text(digits) for name in ways),
            answer.times_gloo.text(),
            answer.share.text(),
        )
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=SIZES_MB)
    parser.add_argument("--rounds", type=int, default=30, help="of each way, for each size")
    options = parser.parse_args()
    sizes = [int(size * MB) for size in options.sizes_mb]
    answers = [
        answer
        for workers in options.workers
        for answer in groups.ask(measure, workers, sizes, options.rounds)
    ]
    console = results_output.console()
    console.print(table(answers, options.rounds))
    if not all(answer.shared for answer in answers):
        console.print(
            f"shared memory is not available: {arena.why_not()}; the first two methods are therefore the same"
        )
    results_output.conclude(console, options.json, {"answers": answers}, marks_of(answers))


if __name__ == "__main__":
    main()
