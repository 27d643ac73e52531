"""Steps of shards with one worker that is slower than the others for a while, divided by speed and evenly.

    python benchmarks/unequal.py [--ranks 4] [--shards 16] [--factor 3] [--shard-ms 20] [--json FILE]

A shard sleeps for `--shard-ms` and computes a gradient of a small model; the slow worker sleeps longer by the factor,
in the middle third of the steps. Workers that sleep do not share cores, so the figures hold for workers with a core
each. The ideal step is that of all workers' speeds added up: with 4 workers, of which one is 3 times slower, 16 shards
take as long as 4.8 shards of a fast worker.

Runs with and without `by_speed` alternate step by step in the same processes. After each step, the weights of both must
have the same bits.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import distributed

import groups
import results_output
from elastic.exact.shards import Shards
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from measurements import Mark

PHASE = 60  # steps: equal speeds, one slow worker, equal speeds
SETTLED = 20  # steps after a change of speeds until the division has followed
SLOW = 1  # the rank
MARK = 1.15


@dataclass(frozen=True)
class SlowWorker:
    shards: int
    factor: float
    shard_s: float


@dataclass(frozen=True)
class UnequalAnswer:
    """Relative to the ideal step of the measured seconds per shard: medians. Steps: until the final division."""

    by_speed: float
    evenly: float
    recovered: float
    slowed_steps: int
    recovered_steps: int
    changes: int
    slow_division: list[int]
    last_division: list[int]


class TimedSteps:
    """Steps of one model, with sleep."""

    def __init__(self, question: SlowWorker, by_speed: bool) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(20, 20)
        self.shards = Shards(question.shards, by_speed=by_speed)
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9),
            self.model.named_parameters(),
            shards=self.shards,
        )
        self.divisions: list[tuple[int, ...]] = []
        self.ratios: list[float] = []  # of each step to the ideal one

    def __call__(self, shard_s: float) -> None:
        distributed.barrier()
        begin = time.perf_counter()
        own = 0.0
        for shard in self.shards:
            began = time.perf_counter()
            time.sleep(shard_s)
            inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(shard))
            self.model(inputs).square().mean().backward()
            own += time.perf_counter() - began
        took = time.perf_counter() - begin
        self._optimizer.step()
        held = torch.tensor([len(self.shards.held), took, own / len(self.shards.held)])
        rows = [torch.empty_like(held) for _ in range(distributed.get_world_size())]
        distributed.all_gather(rows, held)
        self.divisions.append(tuple(int(row[0]) for row in rows))
        ideal = self.shards.count / sum(1.0 / float(row[2]) for row in rows)
        self.ratios.append(max(float(row[1]) for row in rows) / ideal)
        self.shards.committed()


def measure(question: SlowWorker) -> UnequalAnswer:
    slow = distributed.get_rank() == SLOW
    ways = [TimedSteps(question, by_speed) for by_speed in (True, False)]
    for step in range(3 * PHASE):
        slowed = slow and step // PHASE == 1
        for way in ways:
            way(question.shard_s * (question.factor if slowed else 1.0))
        weights = [each for way in ways for each in way.model.parameters()]
        half = len(weights) // 2
        same = all(
            torch.equal(one, other)
            for one, other in zip(weights[:half], weights[half:], strict=True)
        )
        groups.agree("weights are the same bits by speed and evenly", same, f"differ after {step}")
    ours, evenly = ways
    slow_division, last_division = ours.divisions[2 * PHASE - 1], ours.divisions[-1]
    settled = slice(PHASE + SETTLED, 2 * PHASE)
    return UnequalAnswer(
        statistics.median(ours.ratios[settled]),
        statistics.median(evenly.ratios[settled]),
        statistics.median(ours.ratios[2 * PHASE + SETTLED :]),
        steps_until(ours.divisions[PHASE : 2 * PHASE], slow_division),
        steps_until(ours.divisions[2 * PHASE :], last_division),
        sum(one != other for one, other in zip(ours.divisions, ours.divisions[1:], strict=False)),
        list(slow_division),
        list(last_division),
    )


def steps_until(divisions: list[tuple[int, ...]], final: tuple[int, ...]) -> int:
    """Return the number of steps before the division became the final one."""
    return max(
        (number + 1 for number, division in enumerate(divisions) if division != final), default=0
    )


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="workers")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--factor", type=float, default=3.0, help="slowness of one worker")
    parser.add_argument("--shard-ms", type=float, default=20.0, help="of a worker that is not slow")
    options = parser.parse_args()
    question = SlowWorker(options.shards, options.factor, options.shard_ms / 1e3)
    answer = groups.ask(measure, options.ranks, question)
    found = results_output.table(
        f"{options.shards} shards on {options.ranks} workers, one {options.factor:g} times slower for {PHASE} steps",
        *("", "step to the ideal one", "shards by worker", "steps until this division"),
    )
    found.add_row("evenly", f"{answer.evenly:.2f}", "", "")
    divisions = [" ".join(map(str, each)) for each in (answer.slow_division, answer.last_division)]
    found.add_row("by speed", f"{answer.by_speed:.2f}", divisions[0], str(answer.slowed_steps))
    found.add_row(
        "afterwards", f"{answer.recovered:.2f}", divisions[1], str(answer.recovered_steps)
    )
    console = results_output.console()
    console.print(found)
    even = max(answer.last_division) - min(answer.last_division)
    marks = [
        Mark("a step by speed, to the ideal one", MARK, answer.by_speed),
        Mark("steps until the slow worker has its division", SETTLED, answer.slowed_steps),
        Mark("steps until it has recovered its shards", SETTLED, answer.recovered_steps),
        Mark("shards by which the last division differs", 1, even),
        Mark("changes of the division", 4, answer.changes),
    ]
    results_output.conclude(console, options.json, {"answer": answer}, marks)


if __name__ == "__main__":
    main()
