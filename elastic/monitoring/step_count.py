"""Number and size of this process's optimizer steps, for the driver's statistics, counted by a hook of torch.

Of several optimizers only the first one that steps is counted: a script that trains two models makes one step with
both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps: int | None = None  # None: no torch optimizer has stepped
batch: int | None = None  # samples of a step on this rank; None: unknown
state_step: int | None = None  # the state's own step at its newest commit, if it has one
_counted = 0


def committed(step: object) -> None:
    """Record a commit. ``step``: the state's attribute of this name."""
    global state_step
    state_step = step if isinstance(step, int) and not isinstance(step, bool) else None


def of_batches(sizes: set[int | None]) -> None:
    """Set the batch size. ``sizes``: of the loaders in the state."""
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
    """Context of a training function whose steps are counted."""
    handle = register_optimizer_step_post_hook(_stepped)
    try:
        yield
    finally:
        handle.remove()
