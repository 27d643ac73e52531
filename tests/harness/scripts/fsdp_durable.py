"""Trains the model of ``fsdp.py`` with checkpoints. What it has learned is compared bit for bit wherever it begins.

STEPS  how many.   FEATURE, LEAST  see ``fsdp.py``.   SLOW  seconds of pause after each step.
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
import torch
import torch.distributed as dist

import elastic
from elastic.failpoints import set_step


def digest(training: Any) -> str:
    """Of all parameters, buffers and optimizer entries, whole. Collective."""
    found = hashlib.sha256()
    entries = [
        entry
        for optimizer in training.optimizers
        for parameter in optimizer.param_groups[0]["params"]
        for _, entry in sorted(optimizer.state.get(parameter, {}).items())
    ]
    for each in [*training.model.parameters(), *training.model.buffers(), *entries]:
        whole = getattr(each, "full_tensor", lambda each=each: each)()
        found.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    steps = int(os.environ["STEPS"])
    dist.init_process_group()
    training = fsdp.Training(os.environ.get("FEATURE", "plain"), sharded=True)
    more: dict[str, Any] = {
        f"optimizer{number}": each for number, each in enumerate(training.optimizers)
    }
    if "LEAST" in os.environ:
        more["least_shards"] = int(os.environ["LEAST"])
    state = elastic.TorchState(
        model=training.model,
        schedule=training.schedule,
        step=0,
        seen="",
        copies=1,
        rng=True,
        **more,
    )

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
            training.model.steps += 1
            state.step += 1
            state.seen = digest(training)
            state.commit()
            time.sleep(float(os.environ.get("SLOW", "0")))

    train(state)


if __name__ == "__main__":
    main()
