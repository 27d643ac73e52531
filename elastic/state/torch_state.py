"""State of a script that trains with torch."""

from __future__ import annotations

from typing import Any

import torch

from elastic.errors import Invalid
from elastic.state.handled_state import HandledState


class TorchState(HandledState):
    """State of a script that trains with torch: models, optimizers and other values, given by keyword.

    Models, optimizers, schedulers, gradient scalers, samplers and loaders have handlers. All other values are
    copied. If the script assigns another object to such an attribute, as in ``state.model = other``, the state
    handles the new object and saves it.

    A model with ``fully_shard`` applied is committed by shards, and ``commit`` is then a collective. Every rank keeps
    its own shard, and other ranks keep copies of it. See docs/sharded.md.

    ``save`` copies changed values into host buffers that are allocated once. ``restore`` restores the committed bits
    exactly and in place, removes optimizer entries that were created after the commit, and clears gradients. The
    training mode of modules is also committed: if you commit after ``model.eval()``, call ``model.train()`` before
    each step that may follow a restore.

    Args:
        model, optimizer: a ``torch.nn.Module`` and a ``torch.optim.Optimizer``, under the names that Horovod uses.
        rng: whether to commit and restore this worker's random generators (torch, CUDA, numpy, random). They are never
            sent to other workers.
        copies: number of other ranks, if possible on other hosts, that keep a copy of each shard of a fully sharded
            model. Up to ``copies`` ranks can then fail at the same time.
        least_shards: smallest number of shards of a fully sharded model that fits into memory. Each world then has as
            many replicas of the model as its number of ranks allows (HSDP). Default: each rank has its own shard,
            unless the model has a (replicate, shard) mesh.
        **kwargs: other models, optimizers and values, available as attributes of the state.

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
