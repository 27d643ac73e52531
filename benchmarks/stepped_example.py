"""Runs examples/gpt.py as it stands, and writes down its steps as `stepper` does: ``stepped_example.py DIR STEPS``."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import elastic
from stepper import StepLog

EXAMPLES = Path(__file__).parent.parent / "examples"
directory, steps = sys.argv[1:3]
log = StepLog(directory)
run = elastic.run


class LoggedState(elastic.TorchState):
    def commit(self) -> None:
        log.made(self.step)
        super().commit()


def logged(func: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(func)
    def entered(state: elastic.TorchState, *args: Any) -> None:
        log.entered(state.step)
        func(state, *args)

    return run(entered)


elastic.TorchState = LoggedState  # type: ignore[misc]
elastic.run = logged  # type: ignore[assignment]
torch.set_num_threads(1)
sys.path.insert(0, str(EXAMPLES))
sys.argv = ["gpt.py", "--out", directory, "--steps", steps]
runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")
