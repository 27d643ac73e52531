"""The job of the stall benchmark: the example GPT with `elastic.DiLoCo`, a commit after each inner step.

    diloco_stepper.py FOLDER OPTIONS

OPTIONS are arguments of `elastic.DiLoCo` as JSON, and ``islands``, a bool. With ``step_s``, an inner step sleeps so
many seconds and has random gradients in place of the model's, as if another device computed them: many workers then
need less than the cores of this machine.

Workers write the notes of `stress.hosts.training` into FOLDER/steps, and train until they are killed. FOLDER/rounds
receives a file of JSON lines per process: the rank and the lost inner steps at each entry, and the digest of the outer
parameters after each merge.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import elastic
import models
import tests_on_path  # noqa: F401
from stress.hosts.training import Notes


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    notes = Notes(folder / "steps")
    elastic.init()
    torch.manual_seed(1)
    training = models.gpt(os.getpid())
    predict: torch.nn.Module = training.model
    loss: Callable[..., torch.Tensor] = training.loss
    step_s = options.pop("step_s")
    if step_s:
        predict = models.Elsewhere(training.model, step_s)
        loss = lambda model, *_: model()  # noqa: E731
    if options.pop("islands"):
        predict = DistributedDataParallel(predict, process_group=elastic.island_group())
    optimizer = training.optimizer()
    diloco = elastic.DiLoCo(predict, optimizer, **options)
    file = (folder / "rounds" / f"{socket.gethostname()}.{os.getpid()}").open("a", buffering=1)
    committed = merges = 0

    def record(**fields: Any) -> None:
        file.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")

    def record_merge() -> None:
        nonlocal merges
        if sum(diloco.merged) > merges:
            merges = sum(diloco.merged)
            content = b"".join(each.detach().numpy().tobytes() for each in diloco.outer)
            record(what="merged", merges=merges, digest=hashlib.sha256(content).hexdigest())

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        nonlocal committed
        notes.write("entered", diloco.position)
        lost = max(0, committed - diloco.own_steps)
        record(what="entered", rank=elastic.rank(), own=diloco.own_steps, lost=lost)
        record_merge()
        while True:
            inputs, targets = training.batches[diloco.position % models.BATCHES]
            notes.write("began", diloco.position + 1)
            optimizer.zero_grad()
            loss(predict, inputs, targets).backward()
            optimizer.step()
            diloco.step()
            committed = diloco.own_steps
            notes.write("committed", diloco.position)
            record_merge()
            state.commit()

    train(elastic.TorchState(diloco=diloco))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
