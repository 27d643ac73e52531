"""Shared code of the reduction benchmarks: starts ranks as processes with a world and a Gloo group, alternates
variants, and checks results.

Every rank is in a world of `elastic` without a driver, and in torch's default process group over Gloo, which is the
reference and synchronizes the ranks before each turn. Variants alternate in the same processes, in changing order, so
that other load on the machine affects all of them. The slowest rank's time counts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

import tests_on_path  # noqa: F401
from elastic.collectives.interface import Collectives, Op
from elastic.protocol.messages import Address
from elastic.runtime import lifecycle
from harness.ports import free_ports
from measurements import order

CPU = torch.device("cpu")
Found = TypeVar("Found")


class WrongResult(Exception):
    """The measured code has a wrong result, so its time is meaningless."""


@dataclass(frozen=True)
class Meeting:
    """Addresses with which the ranks find each other: the stores of the world and of torch."""

    host: str
    ours: int
    torchs: int


def ask(work: Callable[..., Found], ranks: int, *arguments: Any) -> Found:
    """Run ``work(*arguments)`` in this many ranks. Returns the result of rank 0, as JSON."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns about settings of torchft
    meeting = Meeting("127.0.0.1", *free_ports(2))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        out = Path(folder) / "answer.json"
        spawn(_rank, (work, ranks, meeting, str(out), arguments), nprocs=ranks)
        returns = get_type_hints(work)["return"]
        found: Found = msgspec.json.decode(out.read_bytes(), type=returns)
        return found


def _rank(
    rank: int,
    work: Callable[..., Any],
    ranks: int,
    meeting: Meeting,
    out: str,
    arguments: tuple[Any, ...],
) -> None:
    enter(rank, ranks, meeting)
    answer = work(*arguments)
    if rank == 0:
        Path(out).write_bytes(msgspec.json.encode(answer))
    leave()


def enter(
    rank: int, ranks: int, meeting: Meeting, environ: Mapping[str, str] | None = None
) -> None:
    """Enter the world with one thread per rank. ``environ`` is the environment of the world."""
    torch.set_num_threads(1)
    lifecycle.init_static(rank, ranks, Address(meeting.host, meeting.ours), environ)
    where = f"tcp://{meeting.host}:{meeting.torchs}"
    distributed.init_process_group("gloo", where, rank=rank, world_size=ranks)


def leave() -> None:
    distributed.barrier()
    distributed.destroy_process_group()


def ours() -> Collectives:
    """Return a group of all ranks, created as for an optimizer."""
    return lifecycle.current().group("benchmark", CPU)


def named(group: Collectives) -> str:
    """Return the name of a group's backend for the table."""
    return type(group).__name__.removesuffix("Collectives").lower()


# ---- checks --------------------------------------------------------------------------------------


def prove(reduce: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
    """Raise WrongResult unless the variant sums all elements of the ranks' tensors on every rank.

    The numbers are small integers, so that any order of summation gives the same bits. ``tensor`` is set to zero.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    flat = tensor.view(-1)
    places = torch.arange(len(flat), dtype=torch.int64).remainder_(251).to(flat.dtype)
    flat.copy_(places * (rank + 1))
    wanted = places * (ranks * (ranks + 1) // 2)
    distributed.barrier()
    reduce(tensor)
    wrong = int((flat != wanted).sum())
    agree("sums what the ranks have", wrong == 0, f"{wrong} of {len(flat)} elements are wrong")
    flat.zero_()


def agree(claim: str, holds: bool, otherwise: str) -> None:
    """Raise WrongResult on every rank if a claim is false on any rank. Collective."""
    failed = torch.tensor([0.0 if holds else 1.0])
    distributed.all_reduce(failed)
    if failed.item():
        here = otherwise if not holds else "not on another rank"
        raise WrongResult(f"false: this {claim}: {here}")


def same_everywhere(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise WrongResult unless every rank has the same bits."""
    mine = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    zeroth = mine.clone()
    distributed.broadcast(zeroth, 0)
    agree(f"leaves {what} equal on all ranks", torch.equal(mine, zeroth), "this rank's differ")


def sum_with(group: Collectives) -> Callable[[torch.Tensor], None]:
    def reduce(tensor: torch.Tensor) -> None:
        group.allreduce(tensor, Op.SUM).wait()

    return reduce


# ---- time ----------------------------------------------------------------------------------------


def take_turns(
    ways: Mapping[str, Callable[[], None]], rounds: int, *, warmup: int = 3, repeats: int = 1
) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each round, by variant. With ``repeats``, each is the mean of several
    calls."""
    names = list(ways)
    times = torch.zeros(rounds, len(names), dtype=torch.float64)
    for turn in range(-warmup, rounds):
        for name in order(names, turn):
            way = ways[name]
            distributed.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                way()
            if turn >= 0:
                times[turn, names.index(name)] = (time.perf_counter() - began) / repeats
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    return {name: times[:, column].tolist() for column, name in enumerate(names)}
