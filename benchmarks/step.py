"""Time of a training step, compared with torch's DistributedDataParallel and torchft round by round.

    python benchmarks/step.py [--models mlp gpt convnet] [--ranks 1 2 4] [--rounds 40] [--json FILE]

Every rank has several equal models, each trained by a different variant: with DistributedOptimizer; with DDP at its
defaults; with torchft's DDP, if it is installed; and without any reduction. The variants alternate after each step, in
changing order. The result is the ratio of two steps of a round, which is much more stable on a shared machine than
either time. The slowest rank's times count. Each rank computes in one thread.

Scaling efficiency is the time of a step without reduction divided by that of DistributedOptimizer, both with the same
number of ranks, which compete for the same cores, so that 1.0 means that the reduction has no cost. Before the
measurement, the gradients of every variant must be the mean over the ranks; at the end, the ranks must have identical
weights.

Decided with earlier results, when every bucket was reduced over Gloo (2 ranks on 2 busy cores, ratio to DDP in the same
run):

    bucket is full at, MB       1     4     8    16    25
    5 layers of 20 MB           -   0.81     -  0.79  0.89    (4 and 16 make the same buckets: one per layer)
    20 layers of 4 MB         0.98  0.95  0.87  0.94  0.93

    collectives at a time       1     2     4
    5 layers of 20 MB         1.00  0.89  1.00                (at 25 MB)

Therefore buckets are full at 8 MB, and two buckets are reduced at a time with Gloo. This was not measured with NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import groups
import models
import results_output
import torchft_side
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer
from measurements import Mark, Spread, ratio, spread

WARMUP = 5
MODELS = ("mlp", "gpt", "convnet")
PEERS = ("ddp", "torchft")
NAMES = {"ours": "DistributedOptimizer", "ddp": "torch DDP", "torchft": "torchft"}
# Ratio of our step to DDP's.
MARKS = {("mlp", 2): 0.6, **{(name, ranks): 0.9 for name in ("gpt", "convnet") for ranks in (2, 4)}}


@dataclass(frozen=True)
class Question:
    model: str
    rounds: int
    peers: tuple[str, ...]  # that are available
    first_mb: float
    full_mb: float


@dataclass(frozen=True)
class Answer:
    model: str
    parameters: int
    ranks: int
    carried_by: str  # our group's backend
    ms: dict[str, Spread]  # by way
    to: dict[str, Spread]  # ours / that of each peer
    efficiency: Spread


# ---- in each rank --------------------------------------------------------------------------------


def measure(question: Question) -> Answer:
    gradient_reducer.FIRST_BYTES = int(question.first_mb * (1 << 20))
    gradient_reducer.FULL_BYTES = int(question.full_mb * (1 << 20))
    rank = distributed.get_rank()
    ways = {"alone": alone(question, rank), "ours": ours(question, rank)}
    if "ddp" in question.peers:
        ways["ddp"] = ddp(question, rank)
    torchft = torchft_side.Torchft() if "torchft" in question.peers else None
    if torchft is not None:
        ways["torchft"] = torchft.steps(models.make(question.model, rank))
    for _ in range(WARMUP):
        for steps in ways.values():
            distributed.barrier()
            steps()
    prove(ways)
    times = groups.take_turns(ways, question.rounds)
    for name, steps in ways.items():
        if name != "alone":
            groups.same_everywhere(f"the model of {name}", list(steps.model.parameters()))
    if torchft is not None:
        torchft.close()
    return Answer(
        model=question.model,
        parameters=models.parameters(ways["ours"].model),
        ranks=distributed.get_world_size(),
        carried_by=groups.named(groups.ours()),
        ms={name: spread(seconds).times(1e3) for name, seconds in times.items()},
        to={peer: ratio(times["ours"], times[peer]) for peer in question.peers},
        efficiency=ratio(times["alone"], times["ours"]),
    )


def alone(question: Question, rank: int) -> models.Steps:
    training = models.make(question.model, rank)
    return models.Steps(training, training.model, training.optimizer())


def ours(question: Question, rank: int) -> models.Steps:
    training = models.make(question.model, rank)
    names = training.model.named_parameters()
    optimizer = DistributedOptimizer(training.optimizer(), names)
    return models.Steps(training, training.model, optimizer)


def ddp(question: Question, rank: int) -> models.Steps:
    training = models.make(question.model, rank)
    wrapped = DistributedDataParallel(training.model)
    return models.Steps(training, wrapped, training.optimizer())


def prove(ways: Mapping[str, models.Steps]) -> None:
    """Raise WrongResult unless every variant's gradients are the mean over the ranks.

    All take one step from equal weights; the expected mean is computed in float64 from the gradients without reduction.
    """
    start = [parameter.detach().clone() for parameter in ways["ours"].model.parameters()]
    for each in start:
        distributed.broadcast(each, 0)
    found = {}
    for name, steps in ways.items():
        with torch.no_grad():
            for parameter, value in zip(steps.model.parameters(), start, strict=True):
                parameter.copy_(value)
        steps()
        found[name] = [_gradient(parameter).clone() for parameter in steps.model.parameters()]
    for index, mine in enumerate(found.pop("alone")):
        wanted = mine.double()
        distributed.all_reduce(wanted)
        wanted /= distributed.get_world_size()
        room = 1e-5 * float(wanted.abs().max()) + 1e-12
        for name, gradients_found in found.items():
            off = float((gradients_found[index].double() - wanted).abs().max())
            claim = f"averages gradient {index} ({name})"
            groups.agree(claim, off <= room, f"{off:.2g} off, of {room * 1e5:.2g}")


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


# ---- output --------------------------------------------------------------------------------------


def marks_of(answers: list[Answer]) -> list[Mark]:
    marks = []
    for answer in answers:
        wanted = MARKS.get((answer.model, answer.ranks))
        if wanted is not None and "ddp" in answer.to:
            what = f"{answer.model}, {answer.ranks} workers, ours / DDP"
            marks.append(Mark(what, wanted, answer.to["ddp"].median))
    return marks


def table(answers: list[Answer], rounds: int, missing: Mapping[str, str]) -> Table:
    found = results_output.table(
        f"a training step, {rounds} rounds: median (quartiles)",
        *("model", "workers", "carried by", "ours, ms", "without reduction, ms"),
        *(each for peer in PEERS for each in (f"{NAMES[peer]}, ms", f"ours / {NAMES[peer]}")),
        "efficiency",
    )
    for answer in answers:
        cells = [f"{answer.model}, {answer.parameters / 1e6:.1f} M", str(answer.ranks)]
        cells += [answer.carried_by, answer.ms["ours"].text(1), answer.ms["alone"].text(1)]
        for peer in PEERS:
            if peer in answer.to:
                cells += [answer.ms[peer].text(1), answer.to[peer].text()]
            else:
                cells += [missing[peer], ""]
        found.add_row(*cells, answer.efficiency.text())
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=MODELS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="workers")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each way")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--first-mb", type=float, default=gradient_reducer.FIRST_BYTES / (1 << 20))
    parser.add_argument("--full-mb", type=float, default=gradient_reducer.FULL_BYTES / (1 << 20))
    options = parser.parse_args()
    missing = {peer: "not asked for" for peer in PEERS if peer not in options.peers}
    if "torchft" not in missing and (why := torchft_side.why_not()):
        missing["torchft"] = why
    peers = tuple(peer for peer in PEERS if peer not in missing)
    answers = []
    for name in options.models:
        question = Question(name, options.rounds, peers, options.first_mb, options.full_mb)
        answers += [groups.ask(measure, ranks, question) for ranks in options.ranks]
    console = results_output.console()
    console.print(table(answers, options.rounds, missing))
    results_output.conclude(console, options.json, {"answers": answers}, marks_of(answers))


if __name__ == "__main__":
    main()
