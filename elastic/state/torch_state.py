"""State of a script that trains with torch."""

from __future__ import annotations

from typing import Any

import torch

from elastic.errors import Invalid
from elastic.state.handled_state import HandledState


class TorchState(HandledState):
    """State of a script that trains with torch: models, optimizers and other values, given by keyword.

    Models, optimizers, schedulers, gradient scalers, samplers and loaders have handlers. All other values are
    copied. Assigning a handled name, as in ``state.model = other``, handles and saves the new value. ``rng=True``
    also commits and restores this worker's random generators (torch, CUDA, numpy, random), which are never sent to
    other workers.

    A model with ``fully_shard`` applied is committed by shards: every rank keeps its own shard, and ``copies`` other
    ranks, if possible on other hosts, keep a copy. Up to ``copies`` ranks can then fail at the same time, and
    ``commit`` is a collective. ``least_shards`` is the smallest number of shards that memory allows; with it, each
    world has as many replicas of the model as its ranks allow (HSDP). See docs/sharded.md.

    ``save`` copies changed values into host buffers that are allocated once. ``restore`` restores the committed bits
    exactly and in place, drops optimizer entries created after the commit, and clears gradients. The training mode of
    modules is also committed: if you commit after ``model.eval()``, call ``model.train()`` before each step that may
    follow a restore.

    Raises:
        Invalid: a value cannot be copied, or looks like a misspelled option.

    Example::

        state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
        state.step += 1
        state.commit()  # a failure from here on restores this step
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        rng: Any = False,
        copies: Any = 1,
        least_shards: Any = None,
        **kwargs: Any,
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise Invalid(
                f"model is a {type(model).__name__}: pass the torch.nn.Module itself, or use another name for"
                " the value"
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise Invalid(
                f"optimizer is a {type(optimizer).__name__}: pass the torch.optim.Optimizer itself, or use"
                " another name for the value"
            )
        values = {"model": model, "optimizer": optimizer, **kwargs}
        super().__init__(values, rng, copies, least_shards)
