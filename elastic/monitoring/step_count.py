"""How many optimizer steps this process has made, and of which size, for the driver's figures. Acts: one hook of torch.

Of several optimizers the first that steps is counted: a script that trains two models makes one step with both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps: int | None = None  # None: no optimizer of torch has stepped
batch: int | None = None  # samples of a step on this rank; None: not known
state_step: int | None = None  # the state's own at its newest commit, where it has one
_counted = 0


def committed(step: object) -> None:
    """``step``: what the state has by this name."""
    global state_step
    state_step = step if isinstance(step, int) and not isinstance(step, bool) else None


def of_batches(sizes: set[int | None]) -> None:
    """``sizes``: of the loaders in the state."""
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
    """While a function trains."""
    handle = register_optimizer_step_post_hook(_stepped)
    try:
        yield
    finally:
        handle.remove()
