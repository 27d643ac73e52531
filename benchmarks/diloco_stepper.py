"""The job of the stall benchmark: the example GPT with `elastic.DiLoCo`, a commit after each inner step.

    diloco_stepper.py FOLDER OPTIONS        OPTIONS: arguments of `elastic.DiLoCo` as JSON

Workers write the notes of `stress.hosts.training` into FOLDER/steps, and train until they are killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

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
    optimizer = training.optimizer()
    diloco = elastic.DiLoCo(training.model, optimizer, **options)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        notes.write("entered", diloco.position)
        while True:
            inputs, targets = training.batches[diloco.position % models.BATCHES]
            notes.write("began", diloco.position + 1)
            optimizer.zero_grad()
            training.loss(training.model, inputs, targets).backward()
            optimizer.step()
            diloco.step()
            notes.write("committed", diloco.position)
            state.commit()

    train(elastic.TorchState(diloco=diloco))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
