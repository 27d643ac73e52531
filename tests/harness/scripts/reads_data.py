"""Trains as many steps as a file says that no argument names; FOLDER has it, and a second one by which ranks differ."""

from __future__ import annotations

import os
from pathlib import Path

import elastic

FOLDER = Path(os.environ["FOLDER"])

elastic.init()
steps = int((FOLDER / "steps.txt").read_text())
(FOLDER / f"rank{elastic.rank()}.txt").read_text()


@elastic.run
def train(state):
    while state.step < steps:
        state.step += 1
        state.commit()
    print(f"ends at {state.step}")


train(elastic.ObjectState(step=0))
