"""Memory of a worker with a committed TorchState, compared with DDP, in separate processes.

    python benchmarks/memory.py [--models mlp gpt] [--ranks 2] [--steps 10] [--rounds 3] [--json FILE]

It measures PSS, in which a page that several processes share is divided among them, so that the sum over the workers
counts each page once. Memory that is shared with other workers or mapped from peers is therefore included. PSS is read
when all workers have trained for some steps and hold their last gradients. Jobs with DistributedOptimizer and with DDP
alternate. Both import the same modules, whose memory is also shown.

Limit: DDP's memory plus 1.05 times the snapshot.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import elastic
import groups
import models
import results_output
from measurements import Mark

MB = 1 << 20
ROOM = 1.05  # limit relative to the snapshot


@dataclass(frozen=True)
class Taken:
    """Mean memory of the workers of one job, in bytes."""

    before: float  # memory with all modules, the world and torch's group, without a model
    trained: float
    snapshot: int  # size of the snapshot in bytes, or 0 without a snapshot


@dataclass(frozen=True)
class Answer:
    model: str
    ranks: int
    ours: list[Taken]
    ddp: list[Taken]

    @property
    def snapshot(self) -> int:
        return self.ours[0].snapshot

    @property
    def more(self) -> float:
        """Additional memory compared with DDP: the median job of each."""
        return _median(self.ours) - _median(self.ddp)

    def mark(self) -> Mark:
        what = f"{self.model}, {self.ranks} workers, more than DDP in snapshots"
        return Mark(what, ROOM, self.more / self.snapshot)


def _median(jobs: list[Taken]) -> float:
    return statistics.median(job.trained for job in jobs)


def pss(rollup: str) -> int:
    """Parse the PSS in bytes from /proc/PID/smaps_rollup."""
    for line in rollup.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return int(rest.split()[0]) << 10
    raise ValueError(f"no Pss line in {rollup[:200]!r}")


def measure(model: str, kind: str, steps: int) -> Taken:
    before = taken()
    training = models.make(model, distributed.get_rank())
    if kind == "ours":
        names = training.model.named_parameters()
        optimizer = elastic.DistributedOptimizer(training.optimizer(), names)
        stepped = models.Steps(training, training.model, optimizer)
        state = elastic.TorchState(model=training.model, optimizer=optimizer, step=0)
    else:
        wrapped = DistributedDataParallel(training.model)
        stepped = models.Steps(training, wrapped, training.optimizer())
    for _ in range(steps):
        stepped()
        if kind == "ours":
            state.step += 1
            state.commit()
    snapshot = 0
    if kind == "ours":
        snapshot = models.bytes_of_state(training.model, stepped.optimizer)
    trained = taken()
    groups.same_everywhere("the model", list(training.model.parameters()))
    return Taken(before, trained, snapshot)


def taken() -> float:
    """Return the mean PSS of the workers while all of them are idle."""
    gc.collect()
    distributed.barrier()
    here = torch.tensor([float(pss(Path("/proc/self/smaps_rollup").read_text()))]).double()
    distributed.barrier()
    distributed.all_reduce(here)
    return float(here.item()) / distributed.get_world_size()


def ask(model: str, ranks: int, steps: int, rounds: int) -> Answer:
    found: dict[str, list[Taken]] = {"ours": [], "ddp": []}
    for turn in range(rounds):
        for kind in ("ours", "ddp") if turn % 2 else ("ddp", "ours"):
            found[kind].append(groups.ask(measure, ranks, model, kind, steps))
    return Answer(model, ranks, found["ours"], found["ddp"])


def table(answers: list[Answer]) -> Table:
    title = "memory of a worker (PSS), MB: median job (least .. most)"
    found = results_output.table(title, "model", "workers", "", "before the model", "trained")
    for answer in answers:
        for name, jobs in ("ours, committed", answer.ours), ("torch DDP", answer.ddp):
            row = [answer.model, str(answer.ranks), name]
            for values in [job.before for job in jobs], [job.trained for job in jobs]:
                row.append(
                    f"{statistics.median(values) / MB:.1f} ({min(values) / MB:.1f} .. {max(values) / MB:.1f})"
                )
            found.add_row(*row)
        found.add_row(answer.model, "", "difference", "", f"{answer.more / MB:.1f}")
        found.add_row(answer.model, "", "snapshot", "", f"{answer.snapshot / MB:.1f}")
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=["mlp", "gpt"])
    parser.add_argument("--ranks", type=int, default=2, help="workers")
    parser.add_argument("--steps", type=int, default=10, help="before memory is looked at")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind")
    options = parser.parse_args()
    answers = [ask(model, options.ranks, options.steps, options.rounds) for model in options.models]
    console = results_output.console()
    console.print(table(answers))
    marks = [answer.mark() for answer in answers]
    results_output.conclude(console, options.json, {"answers": answers}, marks)


if __name__ == "__main__":
    main()
