"""Time of torch.distributed's collectives, and of a step of DDP, with the backend of this package compared with Gloo.

    python benchmarks/torch_backend.py [--ranks 2 4] [--rounds 20] [--sizes-kb 1 64 1024 10240 102400] [--json FILE]
    python benchmarks/torch_backend.py --models mlp gpt convnet --sizes-kb
    python benchmarks/torch_backend.py --fsdp mlp gpt --sizes-kb
    python benchmarks/torch_backend.py --zero mlp gpt --sizes-kb

Both process groups have the same ranks in the same processes, and are used alternately with equal tensors through
torch's own functions. The result is the ratio of two calls of a round: below 1, the backend of this package is faster.
A size is that of a rank's input of an allreduce, and the total that a rank receives from the others if it gets a part
from each.

``--fsdp``: a step of a model whose layers are each sharded by FSDP2 (``fully_shard``), without commits. ``--zero``: a
step of DDP with ZeroRedundancyOptimizer over both, one of DistributedOptimizer with zero=1 compared with that over
Gloo, and the optimizer's bytes of the rank that has most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import groups
import models
import results_output
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.torch_backend import registration
from measurements import Mark, Spread, ratio, size_text, spread

KB = 1 << 10
SIZES_KB = (1, 64, 1024, 10 * 1024, 100 * 1024)
IN_A_ROW_BYTES = 4 << 20
MOST_IN_A_ROW = 30
MARKS = {"mlp": 0.7, "gpt": 0.95, "convnet": 0.95}  # limits for a step
NEVER_SLOWER = 1.0
FSDP = "FSDP2"
FSDP_MARK = 0.75  # of a step
ZERO = "ZeRO-1"
ZERO_MARK = 1.05  # limit for a step
SHARE_MARK = 1.2  # limit relative to the mean of all ranks' shares of the optimizer's bytes
distributed: Any = torch.distributed  # the stubs lack functions that this benchmark uses


@dataclass(frozen=True)
class Answer:
    what: str
    size: int  # in bytes, or 0 for a whole step
    ranks: int
    ms: dict[str, Spread]  # "ours", "gloo"
    to_gloo: Spread
    share: float | None = None  # largest share of the optimizer's bytes that a rank has


# ---- in each rank --------------------------------------------------------------------------------


def calls(group: Any, size: int, rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return the calls, each with its own tensors."""
    count = size // 4
    share = max(count // ranks, 1)
    whole, part = torch.zeros(share * ranks), torch.zeros(share)
    other, lists = torch.zeros(share * ranks), [torch.zeros(share) for _ in range(ranks)]
    one = torch.zeros(count)
    to, source = (rank + 1) % ranks, (rank - 1) % ranks

    def exchange() -> None:
        works = [
            distributed.isend(one, to, group=group),
            distributed.irecv(other[:count], source, group=group),
        ]
        for work in works:
            work.wait()

    given = lists if rank == 0 else None
    return {
        "all_reduce": lambda: distributed.all_reduce(one, group=group),
        "broadcast": lambda: distributed.broadcast(one, 0, group=group),
        "reduce": lambda: distributed.reduce(one, 0, group=group),
        "all_gather": lambda: distributed.all_gather(lists, part, group=group),
        "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(
            whole, part, group=group
        ),
        "gather": lambda: distributed.gather(part, given, dst=0, group=group),
        "scatter": lambda: distributed.scatter(part, given, src=0, group=group),
        "reduce_scatter_tensor": lambda: distributed.reduce_scatter_tensor(
            part, whole, group=group
        ),
        "all_to_all_single": lambda: distributed.all_to_all_single(other, whole, group=group),
        "isend, irecv": exchange,
    } | ({"barrier": lambda: distributed.barrier(group=group)} if size == KB else {})


def measure(sizes: list[int], rounds: int, only: list[str]) -> list[Answer]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    ours = our_group()
    answers = []
    for size in sizes:
        mine, gloos = (calls(group, size, rank, ranks) for group in (ours, None))
        repeats = max(1, min(MOST_IN_A_ROW, IN_A_ROW_BYTES // size))
        for name, call in mine.items():
            if only and name not in only:
                continue
            ways = {"ours": call, "gloo": gloos[name]}
            times = groups.take_turns(ways, rounds, repeats=repeats)
            answers.append(_answer(name, size, ranks, times))
    return answers


def measure_steps(model: str, rounds: int) -> Answer:
    ranks = distributed.get_world_size()
    ways = {"ours": steps(model, our_group()), "gloo": steps(model, None)}
    prove_gradients(ways)
    times = groups.take_turns(ways, rounds, warmup=5)
    for name, way in ways.items():
        groups.same_everywhere(f"the model over {name}", list(way.model.parameters()))
    return _answer(f"a step of DDP, {model}", 0, ranks, times)


def measure_fsdp(model: str, rounds: int) -> Answer:
    ranks = distributed.get_world_size()
    ways = {
        "ours": fsdp_steps(model, our_group()),
        "gloo": fsdp_steps(model, distributed.group.WORLD),
    }
    prove_gradients(ways)
    times = groups.take_turns(ways, rounds, warmup=5)
    for name, way in ways.items():
        whole: list[Any] = list(way.model.parameters())
        groups.same_everywhere(f"the model over {name}", [each.full_tensor() for each in whole])
    return _answer(f"a step of {FSDP}, {model}", 0, ranks, times)


def fsdp_steps(name: str, group: Any) -> models.Steps:
    training = models.make(name, distributed.get_rank())
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in models.layers(training.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(training.model, mesh=mesh)
    return models.Steps(training, training.model, training.optimizer())


def measure_zero(model: str, rounds: int) -> list[Answer]:
    ranks = distributed.get_world_size()
    gloo, backend, own = zero_steps(model, None), zero_steps(model, our_group()), zero_one(model)
    ways = {"gloo": gloo, "backend": backend, "own": own}
    prove_gradients(ways)
    times = groups.take_turns(ways, rounds, warmup=5)
    for name, way in ways.items():
        groups.same_everywhere(f"the model of {name}", list(way.model.parameters()))
    answers = []
    for name, title in (("backend", ZERO), ("own", f"{ZERO} by DistributedOptimizer")):
        pair = {"ours": times[name], "gloo": times["gloo"]}
        answer = _answer(f"a step of {title}, {model}", 0, ranks, pair)
        answers.append(replace(answer, share=largest_share(ways[name].optimizer)))
    return answers


def largest_share(optimizer: Any) -> float:
    """Return the largest share of the bytes of all entries that a rank has."""
    state = getattr(optimizer, "optim", optimizer).state
    mine = torch.tensor(sum(each.nbytes for kept in state.values() for each in kept.values()))
    each_has = [torch.zeros_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(each_has, mine)
    return max(map(int, each_has)) / sum(map(int, each_has))


def zero_one(name: str) -> models.Steps:
    training = models.make(name, distributed.get_rank())
    plain = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    optimizer = DistributedOptimizer(plain, training.model.named_parameters(), zero=1)
    return models.Steps(training, training.model, optimizer)


def zero_steps(name: str, group: Any) -> models.Steps:
    training = models.make(name, distributed.get_rank())
    wrapped = DistributedDataParallel(training.model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, process_group=group, lr=1e-4
    )
    return models.Steps(training, wrapped, optimizer)


def prove_gradients(ways: dict[str, models.Steps]) -> None:
    """Check the gradients after the first step.

    Later, rounding in a different order may move an input of a ReLU in the convnet across zero.
    """
    for way in ways.values():
        way()
    gloos = list(ways["gloo"].model.parameters())
    for way in ways.values():
        for one, other in zip(way.model.parameters(), gloos, strict=True):
            ours, theirs = local_gradient(one), local_gradient(other)
            if not ours.numel():
                continue
            largest, off = (float(each.abs().max()) for each in (theirs, ours - theirs))
            what = f"one is {off:.2g} off, of {largest:.2g}"
            groups.agree("has Gloo's gradients", off <= 1e-5 * largest, what)


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a gradient that is a DTensor, otherwise the gradient."""
    assert parameter.grad is not None
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def steps(name: str, group: Any) -> models.Steps:
    training = models.make(name, distributed.get_rank())
    wrapped = DistributedDataParallel(training.model, process_group=group)
    return models.Steps(training, wrapped, training.optimizer())


def our_group() -> Any:
    registration.register()
    return distributed.new_group(backend="elastic")


def _answer(what: str, size: int, ranks: int, times: dict[str, list[float]]) -> Answer:
    ms = {name: spread(seconds).times(1e3) for name, seconds in times.items()}
    return Answer(what, size, ranks, ms, ratio(times["ours"], times["gloo"]))


# ---- output --------------------------------------------------------------------------------------


def table(answers: list[Answer], rounds: int) -> Table:
    title = f"torch.distributed on one host, ms, {rounds} rounds: median (quartiles)"
    found = results_output.table(
        title, "", "size", "workers", "ours", "Gloo", "ours / Gloo", "optimizer"
    )
    for answer in answers:
        size = size_text(answer.size) if answer.size else ""
        ms = [answer.ms[name].text(3) for name in ("ours", "gloo")]
        share = "" if answer.share is None else f"{answer.share:.0%} of its bytes"
        found.add_row(answer.what, size, str(answer.ranks), *ms, answer.to_gloo.text(), share)
    return found


def marks_of(answers: list[Answer]) -> list[Mark]:
    return [
        Mark(
            f"{answer.what}{', ' + size_text(answer.size) if answer.size else ''}, {answer.ranks} workers",
            NEVER_SLOWER
            if answer.size
            else ZERO_MARK
            if ZERO in answer.what
            else FSDP_MARK
            if FSDP in answer.what
            else MARKS[answer.what.rpartition(" ")[2]],
            answer.to_gloo.median,
        )
        for answer in answers
    ] + [
        Mark(
            f"{answer.what}, {answer.ranks} workers, bytes", SHARE_MARK, answer.share * answer.ranks
        )
        for answer in answers
        if answer.share is not None and "DistributedOptimizer" in answer.what
    ]


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="workers")
    parser.add_argument("--rounds", type=int, default=20, help="calls, or steps, of each")
    parser.add_argument("--sizes-kb", type=int, nargs="*", default=SIZES_KB)
    parser.add_argument("--only", nargs="*", default=[], help="collectives, by the table's names")
    parser.add_argument("--models", nargs="*", choices=models.MODELS, default=[])
    parser.add_argument("--fsdp", nargs="*", choices=models.MODELS, default=[], help="with FSDP2")
    parser.add_argument("--zero", nargs="*", choices=models.MODELS, default=[], help="with ZeRO-1")
    options = parser.parse_args()
    answers = []
    for ranks in options.ranks:
        if options.sizes_kb:
            sizes = [size * KB for size in options.sizes_kb]
            answers += groups.ask(measure, ranks, sizes, options.rounds, options.only)
        for model in options.models:
            answers.append(groups.ask(measure_steps, ranks, model, options.rounds))
        for model in options.fsdp:
            answers.append(groups.ask(measure_fsdp, ranks, model, options.rounds))
        for model in options.zero:
            answers += groups.ask(measure_zero, ranks, model, options.rounds)
    console = results_output.console()
    console.print(table(answers, options.rounds))
    marks = marks_of(answers)
    results_output.print_targets(console, [mark for mark in marks if not mark.met])
    console.print(f"{sum(mark.met for mark in marks)} of {len(marks)} targets met")
    results_output.write_json(options.json, {"answers": answers}, marks)


if __name__ == "__main__":
    main()
