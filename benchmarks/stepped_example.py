"""Run one of the examples, and log its steps as `stepper` does.

stepped_example.py DIR gpt STEPS            for this number of steps
stepped_example.py DIR lightning            or another of `ENDLESS`: to the step whose number is in DIR/stop, or
                                            to the end of its epoch
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import elastic
from elastic.state.torch_state import TorchState
from stepper import StepLog

EXAMPLES = Path(__file__).parent.parent / "examples"
ENDLESS = {
    "lightning": "lightning_elastic.py",
    "fabric": "fabric_elastic.py",
    "transformers": "transformers_elastic.py",
    "accelerate": "accelerate_elastic.py",
    "timm": "timm_elastic.py",
}
directory, name, *steps = sys.argv[1:]
stop = Path(directory, "stop")
log = StepLog(directory)
run, commit = elastic.run, TorchState.commit
latest: list[TorchState] = []


def trainer_of(state: TorchState) -> Any:
    """Return the trainer of Lightning or Hugging Face. None means that the example has its own loop."""
    return getattr(vars(state).get("progress"), "_trainer", None)


def step_of(state: TorchState) -> int:
    trainer = trainer_of(state)
    if trainer is None:
        return int(state.step)
    return int((trainer if name == "lightning" else trainer.state).global_step)


def end_soon(state: TorchState) -> None:
    trainer = trainer_of(state)
    if trainer is None:
        vars(sys.modules["__main__"])["options"].epochs = state.epoch + 1
    elif name == "lightning":
        loop = trainer.fit_loop
        loop.max_epochs = min(loop.max_epochs, trainer.current_epoch + 1)  # the loop reads it again
    else:
        trainer.control.should_training_stop = True


def logged_commit(state: TorchState) -> None:
    latest[:] = [state]
    step = step_of(state)
    log.made(step)
    if not steps and stop.exists() and step >= int(stop.read_text()):
        end_soon(state)
    commit(state)


def logged(func: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(func)
    def entered(state: TorchState, *args: Any) -> None:
        log.entered(step_of(state))
        func(state, *args)

    return run(entered)


TorchState.commit = logged_commit  # type: ignore[method-assign,assignment]
if name == "gpt":
    elastic.run = logged  # type: ignore[assignment]
torch.set_num_threads(1)
sys.path.insert(0, str(EXAMPLES))
if name == "gpt":
    sys.argv = ["gpt.py", "--out", directory, "--steps", *steps]
    runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")
else:
    os.chdir(directory)  # a trainer creates folders
    sys.argv = [ENDLESS[name], "--epochs", "100000", "--samples", "960", "--pause", "0"]
    runpy.run_path(str(EXAMPLES / ENDLESS[name]), run_name="__main__")
    log.ended(latest[0].model.parameters())
