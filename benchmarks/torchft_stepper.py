"""A replica group of the torchft DiLoCo benchmark: the example GPT with torchft's DiLoCo.

    torchft_stepper.py FOLDER OPTIONS

Runs in a Python environment with torchft. OPTIONS are a JSON object: ``every`` and ``delay`` in inner steps;
``step_s``, which replaces the model by so many seconds of sleep unless it is 0; ``replica``; ``bucket``, which sends a
fragment as one tensor; and ``steps``, the length of a training whose validation loss is measured, or 0 for a training
that runs until the process is killed.

Writes the notes of `stress.hosts.training` into FOLDER/steps. A note that training was entered is written after the
inner step in which the quorum has changed. FOLDER/rounds receives a file of JSON lines per process: merges with the
digest of the fragment's outer parameters, and syncs whose vote failed. FOLDER/loss receives the validation loss.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import models

OUTER: dict[str, Any] = {
    "lr": 0.7,
    "momentum": 0.9,
    "nesterov": True,
}  # as elastic.DiLoCo's default
MIX = 0.5  # weight of the inner parameters in a merge


class Records:
    """Notes and records of this process."""

    def __init__(self, folder: Path, manager: Any) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}"
        self._notes = (folder / "steps" / name).open("a", buffering=1)
        self._rounds = (folder / "rounds" / name).open("a", buffering=1)
        self._manager = manager
        self.steps = 0
        self._quorum = -1
        self._pending: list[dict[str, Any]] = []

    def committed(self) -> None:
        """Record the end of an inner step."""
        self.steps += 1
        if self._manager._quorum_id != self._quorum:
            self._quorum = self._manager._quorum_id
            self._note("entered")
        self._note("committed")
        for words in self._pending:
            self._rounds.write(json.dumps({"at": time.monotonic(), **words}) + "\n")
        self._pending.clear()

    def _note(self, kind: str) -> None:
        size = self._manager.num_participants()
        self._notes.write(f"{time.monotonic():.6f} {kind} {self.steps} {size}\n")

    def watch(self, fragment: Any, share: float) -> None:
        """Record the syncs of a fragment, which is this share of the parameters."""
        sync: Callable[[], bool] = fragment.perform_sync
        last = 0

        def perform_sync() -> bool:
            nonlocal last
            merged = sync()
            if merged:
                outer = [each.numpy().tobytes() for each in fragment.original_parameters.values()]
                digest = hashlib.sha256(b"".join(outer)).hexdigest()
                words = {"merges": self._manager.current_step(), "digest": digest}
                self._pending.append({"what": "merged", **words})
            else:
                lost = share * (self.steps + 1 - last)
                self._pending.append({"what": "failed", "lost": lost})
            last = self.steps + 1
            return merged

        fragment.perform_sync = perform_sync


def fragments_of(model: Any) -> list[nn.Module]:
    """Return four modules with all parameters of the GPT."""
    first, *middle, last = model.blocks
    return [nn.ModuleList([model.embedding, first]), *middle, nn.ModuleList([last, model.head])]


def training_of(
    options: dict[str, Any],
) -> tuple[Any, torch.optim.Optimizer, Callable[[int], None]]:
    """Return the model, its inner optimizer, and a function that computes the gradients of an inner step."""
    if options["steps"]:
        course = models.GptCourse(options["replica"], options["steps"], seed=0)
        return course.model, course.optimizer, course.backward
    torch.manual_seed(1)
    training = models.gpt(os.getpid())
    optimizer = training.optimizer()
    slept = models.Elsewhere(training.model, options["step_s"])

    def backward(step: int) -> None:
        inputs, targets = training.batches[step % models.BATCHES]
        optimizer.zero_grad()
        loss = slept() if slept.step_s else training.loss(training.model, inputs, targets)
        loss.backward()

    return training.model, optimizer, backward


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model, optimizer, backward = training_of(options)
    host = socket.gethostname()
    c10d: Any = distributed  # its stubs do not export TCPStore
    store = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    torchft: Any = importlib.import_module("torchft")
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        replica_id=str(options["replica"]),
    )
    records = Records(folder, manager)
    fragments = fragments_of(model)
    diloco = importlib.import_module("torchft.local_sgd").DiLoCo(
        manager,
        fragments,
        optimizer,
        [torch.optim.SGD(each.parameters(), **OUTER) for each in fragments],
        sync_every=options["every"],
        use_bucketization=options["bucket"],
        fragment_sync_delay=options["delay"],
        fragment_update_alpha=MIX,
    )
    for fragment in diloco._fragments:
        size = models.parameters(fragment._model_fragment)
        records.watch(fragment, size / models.parameters(model))
    with diloco:
        while not options["steps"] or records.steps < options["steps"]:
            backward(records.steps)
            optimizer.step()
            records.committed()
    diloco._restore_parameters()
    if options["replica"] == 0:
        part = folder / "loss.part"
        part.write_text(str(models.validation_loss(model)))
        part.rename(folder / "loss")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
