"""Cost of a step in shards, compared with an ordinary step of the same number of workers, and with its computation
alone.

    python benchmarks/exact_step.py [--models mlp gpt] [--ranks 2 4] [--shards 8] [--rounds 30] [--json FILE]
    python benchmarks/exact_step.py --memory [--models mlp] [--ranks 1 2 4 8] [--shards 8] [--rounds 3]

There are two measurements with alternating steps; the result is the ratio of two steps of a round.

Without --shards, W = S: every worker has one shard with as many samples as an ordinary step, and the sum along the tree
replaces the sum in the order of ranks.

S shards on W workers are compared with workers that compute as many shards, add the bytes of the partials with a plain
allreduce, and step their optimizers. The slowest counts, so with a core per worker that is the time of the worker with
the most shards; if workers share cores, both variants have the same total work. An allreduce of n bytes on W ranks
reads W n and writes W n; here all partials are read, and every rank gets a result. `alone` is the same without the
allreduce, so the difference is the cost of the bytes. Each variant takes 20 steps first: until then ranks access pages
of each other's memory that are not mapped yet, which takes up to a second in total for 100 MB on 8 workers.

A gradient that is a partial by itself, as all are with 8 workers, stays where backward has created it, and no other
rank can access it there. `copied` is `beside` with one copy of each of these to shared memory, as in an ordinary step
of this package and in DDP. A sum of several gradients is written there in any case.

Every rank computes in one thread. Tests check that losses and weights are identical everywhere; this program compares
the ranks' models at the end.

--memory: the peak PSS (see memory.py) of the largest worker, read each time that backward has created a gradient;
compared with that of an ordinary step, in separate processes. Limit: log2(S) + 1 additional gradients.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import distributed

import groups
import models
import results_output
from elastic.collectives.shared_memory import host_copy
from elastic.exact import reduction_tree
from elastic.exact.shard_assignment import assign
from elastic.exact.shards import Shards
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients.flat_buckets import zeros
from measurements import Mark, Spread, ratio, spread
from memory import pss

EVEN_MARK, MANY_MARK = 1.05, 1.08
WARMUP = 20  # steps of each variant, with many shards


@dataclass(frozen=True)
class ShardQuestion:
    """One measurement.

    Args:
        shards: number of shards. 0 means one per worker, compared with an ordinary step.
    """

    model: str
    shards: int
    rounds: int


@dataclass(frozen=True)
class ShardAnswer:
    model: str
    shards: int
    ranks: int
    mark: float
    ms: dict[str, Spread]
    ratio: Spread
    copied: Spread | None  # ratio to the variant that also copies


class ShardSteps:
    """Training steps of ``count`` shards, one per call.

    Without ``reduced``, only the computation. ``moved`` adds an allreduce of as many bytes as the partials have;
    ``copied`` adds a copy of each partial that is one shard's gradient.
    """

    def __init__(
        self, name: str, count: int, reduced: bool, moved: bool = False, copied: bool = False
    ) -> None:
        rank = distributed.get_rank()
        training = models.make(name, rank)
        self.model, self._training = training.model, training
        with torch.no_grad():
            for each in self.model.parameters():
                distributed.broadcast(each, 0)
        self._shards = Shards(count)
        ranks = distributed.get_world_size()
        dealt = assign(count, ranks)
        self._held = dealt[distributed.get_rank()]
        self.optimizer = training.optimizer()
        self._reduced = reduced
        if reduced:
            self.optimizer = DistributedOptimizer(self.optimizer, shards=self._shards)
        self._moved: torch.Tensor | None = None
        if moved and ranks > 1:
            partials = sum(len(reduction_tree.schedule(held, count)[1]) for held in dealt)
            elements = models.parameters(self.model) * (partials + ranks) // (2 * ranks)
            self._moved = zeros(elements, torch.float32, groups.CPU)
            self._sum = groups.sum_with(groups.ours())
        self._copies: list[host_copy.HostCopy] = []
        single = [
            each
            for each in reduction_tree.schedule(self._held, count)[1]
            if each.stop - each.start == 1
        ]
        if copied and ranks > 1:
            trained: list[torch.Tensor] = list(self.model.parameters())
            for _ in single:
                flat = zeros(models.parameters(self.model), torch.float32, groups.CPU)
                parts = flat.split([each.numel() for each in trained])
                views = [part.view_as(each) for part, each in zip(parts, trained, strict=True)]
                self._copies.append(host_copy.HostCopy(trained, views))

    def __call__(self) -> None:
        for shard in self._shards if self._reduced else self._held:
            inputs, targets = self._training.batches[shard % len(self._training.batches)]
            self._training.loss(self.model, inputs, targets).backward()
        for copy in self._copies:
            gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
            copy.run(gradients, [each.data_ptr() for each in gradients])
        if self._moved is not None:
            self._sum(self._moved)
        self.optimizer.step()
        # Free the gradients now: otherwise those of all variants would exist together, at changing addresses.
        self.optimizer.zero_grad()


def measure(question: ShardQuestion) -> ShardAnswer:
    ranks = distributed.get_world_size()
    shards = question.shards or ranks
    steps = ShardSteps(question.model, shards, reduced=True)
    ways: dict[str, Any] = {"shards": steps}
    if not question.shards:
        training = models.make(question.model, distributed.get_rank())
        optimizer = DistributedOptimizer(training.optimizer(), training.model.named_parameters())
        ways["beside"] = models.Steps(training, training.model, optimizer)
    else:
        ways["beside"] = ShardSteps(question.model, shards, reduced=False, moved=True)
        ways["copied"] = ShardSteps(question.model, shards, reduced=False, moved=True, copied=True)
        ways["alone"] = ShardSteps(question.model, shards, reduced=False)
    warmup = WARMUP if question.shards else 3
    times = groups.take_turns(ways, question.rounds, warmup=warmup)
    groups.same_everywhere("the model in shards", list(steps.model.parameters()))
    ms = {name: spread(each).times(1e3) for name, each in times.items()}
    even = ratio(times["shards"], times["beside"])
    mark = MANY_MARK if question.shards else EVEN_MARK
    copied = ratio(times["shards"], times["copied"]) if "copied" in times else None
    return ShardAnswer(question.model, shards, ranks, mark, ms, even, copied)


@dataclass(frozen=True)
class Peak:
    """Peak memory in bytes."""

    highest: float  # largest worker
    gradient: int


def measure_memory(question: ShardQuestion, in_shards: bool) -> Peak:
    steps: ShardSteps | models.Steps
    if in_shards:
        steps = ShardSteps(question.model, question.shards, reduced=True)
    else:
        training = models.make(question.model, distributed.get_rank())
        optimizer = DistributedOptimizer(training.optimizer(), training.model.named_parameters())
        steps = models.Steps(training, training.model, optimizer)
    highest = 0

    def look(parameter: torch.Tensor) -> None:
        nonlocal highest
        highest = max(highest, pss(Path("/proc/self/smaps_rollup").read_text()))

    for each in steps.model.parameters():
        each.register_post_accumulate_grad_hook(look)
    for _ in range(question.rounds):
        steps()
    most = torch.tensor([float(highest)], dtype=torch.float64)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return Peak(most.item(), 4 * models.parameters(steps.model))


@dataclass(frozen=True)
class MemoryAnswer:
    model: str
    shards: int
    ranks: int
    ordinary: Peak
    in_shards: Peak

    @property
    def more(self) -> float:
        """Additional memory in gradients."""
        return (self.in_shards.highest - self.ordinary.highest) / self.ordinary.gradient

    def mark(self) -> Mark:
        what = f"{self.model}, {self.shards} shards on {self.ranks} workers, more gradients"
        return Mark(what, math.log2(self.shards) + 1, self.more)


def print_memory(options: argparse.Namespace) -> None:
    found = results_output.table(
        "memory of the largest worker (PSS) at its highest",
        *("model", "shards", "workers", "ordinary, MB", "in shards, MB", "more, in gradients"),
    )
    answers = []
    for name in options.models:
        for ranks in options.ranks:
            question = ShardQuestion(name, options.shards or ranks, options.rounds)
            peaks = [groups.ask(measure_memory, ranks, question, way) for way in (False, True)]
            answers.append(answer := MemoryAnswer(name, question.shards, ranks, *peaks))
            megabytes = (f"{each.highest / (1 << 20):.0f}" for each in peaks)
            found.add_row(name, str(question.shards), str(ranks), *megabytes, f"{answer.more:.2f}")
    console = results_output.console()
    console.print(found)
    marks = [answer.mark() for answer in answers]
    results_output.conclude(console, options.json, {"answers": answers}, marks)


def marks_of(answers: list[ShardAnswer]) -> list[Mark]:
    return [
        Mark(
            f"{each.model}, {each.shards} shards on {each.ranks} workers",
            each.mark,
            each.ratio.median,
        )
        for each in answers
    ]


def table(answers: list[ShardAnswer], rounds: int) -> Table:
    found = results_output.table(
        f"a step in shards; median and quartiles of {rounds} rounds",
        *("model", "shards", "workers", "in shards, ms", "beside, ms", "copied, ms", "alone, ms"),
        *("to beside", "to copied"),
    )
    for each in answers:
        names = ("shards", "beside", "copied", "alone")
        ms = (each.ms[name].text(1) if name in each.ms else "" for name in names)
        ratios = (each.ratio.text(), "" if each.copied is None else each.copied.text())
        found.add_row(each.model, str(each.shards), str(each.ranks), *ms, *ratios)
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=["mlp", "gpt"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="workers")
    parser.add_argument("--shards", type=int, default=0, help="of a step; 0: as many as workers")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each way")
    parser.add_argument("--memory", action="store_true", help="how much memory it takes instead")
    options = parser.parse_args()
    if options.memory:
        print_memory(options)
        return
    answers = [
        groups.ask(measure, ranks, ShardQuestion(name, options.shards, options.rounds))
        for name in options.models
        for ranks in options.ranks
    ]
    console = results_output.console()
    console.print(table(answers, options.rounds))
    results_output.conclude(console, options.json, {"answers": answers}, marks_of(answers))


if __name__ == "__main__":
    main()
