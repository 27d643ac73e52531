"""How long is a training step beside torch's DistributedDataParallel? Two workers over Gloo, in one run, paired.

    python benchmarks/step.py [--ranks 2] [--layers 5] [--width 2240] [--batch 8] [--rounds 40] [--json FILE]

Every rank holds two equal models, one trained with DistributedOptimizer and one with DDP at its defaults, and takes
turns: a step of one, a step of the other, in alternating order. The ratio of the two steps of a round is what counts;
on a shared machine it is far steadier than either time. The slowest rank's times are taken.

What it decided (2 ranks on 2 busy cores, ratio to DDP in the same run; DDP has 25 MB and 2 threads):

    bucket is full at, MB       1     4     8    16    25
    5 layers of 20 MB           -   0.81     -  0.79  0.89    (4 and 16 make the same buckets: one per layer)
    20 layers of 4 MB         0.98  0.95  0.87  0.94  0.93

    collectives at a time       1     2     4
    5 layers of 20 MB         1.00  0.89  1.00                (at 25 MB)

So buckets are full at 8 MB, and two of them travel at a time. The time saved beside DDP is the copy from the bucket
back to the gradients, and that a gradient's own memory is free again as soon as it was copied: a tenth of the CPU time
of the step. Nothing of this was measured over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from elastic import gradients, runtime
from elastic.optimizer import DistributedOptimizer
from elastic.protocol import Address

WARMUP = 5


@dataclass(frozen=True)
class Question:
    ranks: int
    layers: int
    width: int
    batch: int
    rounds: int
    keep_gradients: bool
    first_mb: float
    full_mb: float


@dataclass(frozen=True)
class Answer:
    parameters: int
    ours_ms: float  # medians
    ddp_ms: float
    ratio: float  # median of ours / ddp over the rounds
    low: float  # its quartiles
    high: float


def model(question: Question) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(question.layers):
        layers += [torch.nn.Linear(question.width, question.width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def ours(question: Question) -> tuple[Callable[[], None], torch.nn.Module]:
    trained = model(question)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=0.01), trained.named_parameters()
    )
    return stepper(question, trained, optimizer), trained


def ddp(question: Question) -> tuple[Callable[[], None], torch.nn.Module]:
    trained = model(question)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    return stepper(question, DistributedDataParallel(trained), optimizer), trained


def stepper(question: Question, trained: torch.nn.Module, optimizer: Any) -> Callable[[], None]:
    torch.manual_seed(runtime.current().place.rank)
    inputs = torch.randn(question.batch, question.width)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not question.keep_gradients)
        trained(inputs).square().mean().backward()
        optimizer.step()

    return step


def worker(rank: int, question: Question, ports: tuple[int, int], out: str) -> None:
    torch.set_num_threads(1)
    gradients.FIRST_BYTES = int(question.first_mb * (1 << 20))
    gradients.FULL_BYTES = int(question.full_mb * (1 << 20))
    runtime.init_static(rank, question.ranks, Address("127.0.0.1", ports[0]))
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=question.ranks
    )
    our_step, our_model = ours(question)
    ddp_step, ddp_model = ddp(question)
    times = torch.zeros(question.rounds, 2)
    for turn in range(-WARMUP, question.rounds):
        order = [(0, our_step), (1, ddp_step)]
        for column, step in order if turn % 2 else reversed(order):
            distributed.barrier()
            began = time.perf_counter()
            step()
            if turn >= 0:
                times[turn, column] = time.perf_counter() - began
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    for mine, theirs in zip(our_model.parameters(), ddp_model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    if rank == 0:
        ratios = (times[:, 0] / times[:, 1]).tolist()
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = (times.median(dim=0).values * 1e3).tolist()
        count = sum(parameter.numel() for parameter in our_model.parameters())
        answer = Answer(count, medians[0], medians[1], middle, low, high)
        Path(out).write_text(json.dumps(asdict(answer)))
    distributed.barrier()
    distributed.destroy_process_group()


def ask(question: Question, out: Path) -> Answer:
    ports = (free_port(), free_port())
    spawn(worker, (question, ports, str(out)), nprocs=question.ranks)
    return Answer(**json.loads(out.read_text()))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="worker processes")
    parser.add_argument("--layers", type=int, default=5, help="linear layers")
    parser.add_argument("--width", type=int, default=2240, help="inputs and outputs of a layer")
    parser.add_argument("--batch", type=int, default=8, help="samples per worker and step")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind")
    parser.add_argument(
        "--keep-gradients", action="store_true", help="zero_grad(set_to_none=False)"
    )
    parser.add_argument("--first-mb", type=float, default=gradients.FIRST_BYTES / (1 << 20))
    parser.add_argument("--full-mb", type=float, default=gradients.FULL_BYTES / (1 << 20))
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    flags = vars(parser.parse_args())
    report = flags.pop("json")
    question = Question(**flags)
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"step-{os.getpid()}.json"
    try:
        answer = ask(question, out)
    finally:
        out.unlink(missing_ok=True)
    print(f"{answer.parameters / 1e6:.1f} M parameters, batch {question.batch},", end=" ")
    print(f"{question.ranks} ranks over Gloo, {question.rounds} rounds")
    print(f"  DistributedOptimizer  {answer.ours_ms:8.1f} ms")
    print(f"  torch DDP             {answer.ddp_ms:8.1f} ms")
    print(
        f"  ratio                 {answer.ratio:8.3f}     quartiles {answer.low:.3f} .. {answer.high:.3f}"
    )
    if report is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        machine["torch"] = torch.__version__
        result = {"question": asdict(question), "answer": asdict(answer), "machine": machine}
        report.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
