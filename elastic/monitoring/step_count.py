"""Count and batch size of this process's optimizer steps, for the driver's statistics.

Steps of torch's optimizers are counted by a hook. Optimizers of Keras and TensorFlow count their own steps in a
variable, which is read at each commit. If there are several optimizers, only the first one that steps is counted,
because a script that trains two models uses both in each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps: int | None = None  # number of steps, or None if no torch optimizer has stepped
batch: int | None = None  # number of samples of a step on this rank, or None if unknown
state_step: int | None = None  # step counter of the state at its newest commit, or None
commits_every = 1  # number of commit() calls per in-memory copy of the state
_counted = 0  # ID of the torch optimizer whose steps are counted
_taken: int | None = None  # step count of an optimizer at the newest commit


def committed(step: object, taken: int | None = None) -> None:
    """Record a commit.

    Args:
        step: the attribute ``step`` of the state.
        taken: number of steps that an optimizer of the state has counted. It decreases if a commit is restored.
    """
    global steps, _taken
    at(step, taken)
    if taken is not None and not _counted:
        steps = (steps or 0) + max(0, taken - (taken if _taken is None else _taken))
        _taken = taken


def at(step: object, taken: int | None = None) -> None:
    """Set the step to that of the state's newest commit. The arguments are those of `committed`."""
    global state_step
    state_step = step if isinstance(step, int) and not isinstance(step, bool) else taken


def of_batches(sizes: set[int | None]) -> None:
    """Set the batch size of a step.

    Args:
        sizes: batch sizes of the loaders in the state.
    """
    global batch
    batch = next(iter(sizes)) if len(sizes) == 1 else None


def _stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global steps, _counted
    if torch.compiler.is_compiling():
        return
    if steps is None:
        steps, _counted = 0, id(optimizer)
    if id(optimizer) == _counted:
        steps += 1


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Context manager in which the optimizer steps of a training function are counted."""
    handle = register_optimizer_step_post_hook(_stepped)
    try:
        yield
    finally:
        handle.remove()
