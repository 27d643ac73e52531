"""Trains the model of ``fsdp.py`` with checkpoints. What it has learned is compared bit for bit wherever it begins.

STEPS  how many.   FEATURE, LEAST  see ``fsdp.py``.   SLOW  seconds of pause after each step.
ZERO  torch or ours: the model of ``zero.py`` instead, with an optimizer of which each rank has a part.
In each world rank 0 writes a line of ``begins.jsonl``: the step, the ranks, and whether the bits are those of the
commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import fsdp  # type: ignore[import-not-found]
import sharded_run  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import zero  # type: ignore[import-not-found]

import elastic
from elastic.failpoints import set_step


def digest(training: Any) -> str:
    """Return a digest of all whole parameters, buffers and optimizer entries. Collective."""
    found = hashlib.sha256()
    for each in [*training.model.parameters(), *training.model.buffers()]:
        found.update(content(each))
    for name, entry in sorted(entries(training).items()):
        found.update(name.encode() + entry)
    return found.hexdigest()


def content(tensor: Any) -> bytes:
    whole = getattr(tensor, "full_tensor", lambda: tensor)()
    found: bytes = whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def entries(training: Any) -> dict[str, bytes]:
    """By optimizer, parameter and key. Those of which ranks have parts are put together."""
    found: dict[str, bytes] = {}
    for number, optimizer in enumerate(training.optimizers):
        mine = {
            (index, key): (entry.dim() > 0, content(entry))
            for index, parameter in enumerate(
                each for group in optimizer.param_groups for each in group["params"]
            )
            for key, entry in getattr(optimizer, "optim", optimizer)
            .state.get(parameter, {})
            .items()
        }
        everyones: list[Any] = [mine]
        order = getattr(optimizer, "zero_order", [0])
        if hasattr(optimizer, "optim") or hasattr(optimizer, "zero_order"):
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, mine)
        for index, key in {name for each in everyones for name in each}:
            parts = [each[index, key] for each in everyones if (index, key) in each]
            if len(order) > 1 and parts[0][0]:  # elements of all ranks
                parts = [everyones[rank][index, key] for rank in order]
                found[f"{number}.{index}.{key}"] = b"".join(each for _, each in parts)
            else:
                found[f"{number}.{index}.{key}"] = parts[0][1]
    return found


def begin() -> Any:
    """The training of this rank."""
    feature = os.environ.get("FEATURE", "plain")
    how = os.environ.get("ZERO", "")
    return zero.Training(feature, how) if how else fsdp.Training(feature, sharded=True)


def main() -> None:
    steps = int(os.environ["STEPS"])
    dist.init_process_group()
    training = begin()
    least = {"least_shards": int(os.environ["LEAST"])} if "LEAST" in os.environ else {}
    state = sharded_run.state_of(training, seen="", copies=1, rng=True, **least)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        now = digest(training)
        if rank == 0:
            line = {
                "step": state.step,
                "size": size,
                "same": state.seen in ("", now),
                "pid": os.getpid(),
            }
            with Path("begins.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        while state.step < steps:
            set_step(state.step)
            training.step(state.step, rank, size)
            sharded_run.count_step(training, state)
            state.seen = digest(training)
            state.commit()
            time.sleep(float(os.environ.get("SLOW", "0")))

    train(state)


if __name__ == "__main__":
    main()
