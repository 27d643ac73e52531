"""Cost of matching collectives by name: small allreduces compared with plain torch.distributed.

    python benchmarks/negotiation.py [--workers 2] [--rounds 30] [--json FILE]

A round submits N tensors and waits for all of them, once with names (``hvd.allreduce_async_`` of each, then
``hvd.synchronize``) and once without (``torch.distributed.all_reduce(async_op=True)`` of each, then ``wait``). Both use
Gloo in the same processes and take turns in alternating order, a barrier before each; the slowest rank's time counts.
The ratio of the two of a round is much more stable on a shared machine than either time. Names stay the same, as in
training, so that after the first round only the cached negotiation is measured.

Limits: 1,024 tensors of 1 KB at least 3 times faster than without names, because they are fused; one of 1 MB at most
1.2 times slower. 1,024 tensors of 1 MB are not measured: each kind would need a gigabyte in each worker and measure
only bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed

import groups
import horovod.torch as hvd
import results_output
from measurements import Mark, Spread, ratio, size_text, spread

KB, MB = 1 << 10, 1 << 20
CASES = [(1, KB), (64, KB), (1024, KB), (1, MB), (64, MB)]
SINGLE_SHARE = 5  # factor of rounds with one tensor: a millisecond is easily disturbed
LARGE_SHARE = 4  # divisor of rounds with 64 MB
FASTER, SLOWER = 3.0, 1.2  # limits


@dataclass(frozen=True)
class Answer:
    tensors: int
    bytes_each: int
    plain_ms: Spread
    named_ms: Spread
    ratio: Spread  # with names / plain


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


def measure(rounds: int) -> list[Answer]:
    return [measured(count, each, rounds_of(count, each, rounds)) for count, each in CASES]


def measured(count: int, each: int, rounds: int) -> Answer:
    ours = [torch.zeros(each // 4) for _ in range(count)]
    theirs = [torch.zeros(each // 4) for _ in range(count)]
    ways = {"named": named(ours, f"{count} of {each}"), "plain": plain(theirs)}
    times = groups.take_turns(ways, rounds)
    check(ours, theirs)
    plain_ms, named_ms = (spread(times[name]).times(1e3) for name in ("plain", "named"))
    return Answer(count, each, plain_ms, named_ms, ratio(times["named"], times["plain"]))


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Check that both variants reduce, since otherwise the results would be meaningless."""
    for tensors in (ours, theirs):
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + distributed.get_rank())
    named(ours, "check")()
    plain(theirs)()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)


def rounds_of(count: int, each: int, rounds: int) -> int:
    if count == 1:
        return rounds * SINGLE_SHARE
    return max(8, rounds // LARGE_SHARE) if count * each > 8 * MB else rounds


def marks_of(answers: list[Answer]) -> list[Mark]:
    by_case = {(answer.tensors, answer.bytes_each): answer.ratio.median for answer in answers}
    return [
        Mark("1,024 of 1 KB, times as fast", FASTER, 1 / by_case[1024, KB], at_least=True),
        Mark("one of 1 MB, times as long", SLOWER, by_case[1, MB]),
    ]


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--rounds", type=int, default=40, help="of each kind, for each size")
    options = parser.parse_args()
    answers = groups.ask(measure, options.workers, options.rounds)
    table = results_output.table(
        f"allreduce of {options.workers} workers over Gloo, {options.rounds} rounds: median (quartiles)",
        *("tensors", "each", "plain, ms", "named, ms", "named / plain"),
    )
    for answer in answers:
        ms = (each.text() for each in (answer.plain_ms, answer.named_ms, answer.ratio))
        table.add_row(str(answer.tensors), size_text(answer.bytes_each), *ms)
    console, marks = results_output.console(), marks_of(answers)
    console.print(table)
    results_output.conclude(
        console, options.json, {"workers": options.workers, "answers": answers}, marks
    )


if __name__ == "__main__":
    main()
