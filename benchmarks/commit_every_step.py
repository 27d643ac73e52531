"""Cost of a commit after every step: steps of the GPT example with and without commits, in alternating blocks.

    python benchmarks/commit_every_step.py [--ranks 2 4] [--rounds 30] [--block 5] [--json FILE]

One job trains one model. Blocks of steps with a commit after each alternate with blocks of the same length without
commits. The result is the ratio of the two blocks of a round, with the slowest rank's times. Also reported are the time
of the call after a step, and that of a copy of the same number of bytes between existing buffers, which is the minimum
for a snapshot of changing data.

Before the measurement, a restore must reproduce the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import distributed

import elastic
import groups
import models
import results_output
from measurements import Mark, Spread, ratio, spread

WARMUP = 5
WANTED = 1.02  # limit: factor of the step time


@dataclass(frozen=True)
class Answer:
    ranks: int
    snapshot: int  # bytes
    step_ms: Spread  # step without a commit
    committed_ms: Spread  # step with a commit
    ratio: Spread
    call_ms: Spread
    copy_ms: Spread
    call_to_copy: Spread


def measure(model: str, rounds: int, block: int) -> Answer:
    training = models.make(model, distributed.get_rank())
    names = training.model.named_parameters()
    optimizer = elastic.DistributedOptimizer(training.optimizer(), names)
    steps = models.Steps(training, training.model, optimizer)
    state = elastic.TorchState(model=training.model, optimizer=optimizer, step=0)

    def committed() -> None:
        steps()
        state.step += 1
        state.commit()

    for _ in range(WARMUP):
        committed()
    prove(state, steps)
    ways: dict[str, Callable[[], None]] = {"without": steps, "with": committed}
    blocks = groups.take_turns(ways, rounds, repeats=block)
    snapshot = models.bytes_of_state(training.model, optimizer)
    calls, copies = calls_and_copies(state, steps, snapshot, rounds)
    groups.same_everywhere("the model", list(training.model.parameters()))
    return Answer(
        ranks=distributed.get_world_size(),
        snapshot=snapshot,
        step_ms=spread(blocks["without"]).times(1e3),
        committed_ms=spread(blocks["with"]).times(1e3),
        ratio=ratio(blocks["with"], blocks["without"]),
        call_ms=spread(calls).times(1e3),
        copy_ms=spread(copies).times(1e3),
        call_to_copy=ratio(calls, copies),
    )


def prove(state: elastic.TorchState, steps: models.Steps) -> None:
    """Raise WrongResult unless a restore reproduces the commit and discards later changes."""
    state.commit()
    kept = [parameter.detach().clone() for parameter in steps.model.parameters()]
    steps()
    now = list(steps.model.parameters())
    changed = any(not torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    state.restore()
    now = list(steps.model.parameters())
    equal = all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    groups.agree("step changes the model", changed, "there was nothing to commit")
    groups.agree("restores what was committed", equal, "the parameters differ")


def calls_and_copies(
    state: elastic.TorchState, steps: models.Steps, size: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the slowest rank's times of a commit after one step and of a plain copy of as many bytes after another."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def call() -> None:
        state.commit()

    def copy() -> None:
        target.copy_(source)

    times = torch.zeros(rounds, 2, dtype=torch.float64)
    for turn in range(rounds):
        for column, timed in enumerate((call, copy)):
            steps()
            distributed.barrier()
            began = time.perf_counter()
            timed()
            times[turn, column] = time.perf_counter() - began
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    return times[:, 0].tolist(), times[:, 1].tolist()


def table(answers: list[Answer], model: str, rounds: int, block: int) -> Table:
    title = f"{model}: a commit after every step, {rounds} pairs of blocks of {block} steps"
    found = results_output.table(
        f"{title}: median (quartiles)",
        *("workers", "snapshot, MB", "step, ms", "step with commit, ms", "with / without"),
        *("the call, ms", "one copy, ms", "call / copy"),
    )
    for answer in answers:
        found.add_row(
            str(answer.ranks),
            f"{answer.snapshot / (1 << 20):.1f}",
            answer.step_ms.text(1),
            answer.committed_ms.text(1),
            answer.ratio.text(3),
            answer.call_ms.text(),
            answer.copy_ms.text(),
            answer.call_to_copy.text(),
        )
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--model", choices=models.MODELS, default="gpt")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="workers")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--block", type=int, default=5, help="steps of a block")
    options = parser.parse_args()
    answers = [
        groups.ask(measure, ranks, options.model, options.rounds, options.block)
        for ranks in options.ranks
    ]
    console = results_output.console()
    console.print(table(answers, options.model, options.rounds, options.block))
    marks = [
        Mark(f"{each.ranks} workers, step with a commit / without", WANTED, each.ratio.median)
        for each in answers
    ]
    results_output.conclude(console, options.json, {"answers": answers}, marks)


if __name__ == "__main__":
    main()
