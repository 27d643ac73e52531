"""The state of a script that trains with torch."""

from __future__ import annotations

from typing import Any

import torch

from elastic.errors import Invalid
from elastic.state.handled_state import HandledState


class TorchState(HandledState):
    """Models, optimizers, schedulers, gradient scalers, samplers and loaders by keyword; other values as they are.

    ``TorchState(model=net, optimizer=sgd, sampler=sampler, epoch=0)``. ``rng=True`` commits and restores this worker's
    random generators too (torch, CUDA, numpy, random); they are never sent to other workers. Assigning a handled name,
    as in ``state.model = other``, handles and saves the new value. Raises Invalid if a value can't be copied.

    A model with ``fully_shard`` applied is committed by shards: every rank keeps its own, and ``copies`` other ranks,
    on other hosts if there are any, keep a copy. That many ranks can be lost at once. ``commit`` is then a collective.
    With ``least_shards``, the smallest number of shards that memory allows, each world has as many replicas of the
    model as its ranks allow (HSDP). See docs/sharded.md.

    ``save`` copies changed values into host buffers that are allocated once; ``restore`` sets exactly the committed
    bits in place, drops optimizer entries created since, and clears gradients. The training mode of modules is
    committed too: if a commit follows ``model.eval()``, call ``model.train()`` before each step that may follow a
    restore.

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
                f"model is a {type(model).__name__}; pass the torch.nn.Module itself, or give the value another name"
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise Invalid(
                f"optimizer is a {type(optimizer).__name__}; pass the torch.optim.Optimizer itself,"
                " or give the value another name"
            )
        values = {"model": model, "optimizer": optimizer, **kwargs}
        super().__init__(values, rng, copies, least_shards)
