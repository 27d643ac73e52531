"""What a state with shards has to have, so that a commit is all that a run needs to go on exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic.errors import Invalid
from elastic.exact.shards import Shards


def check_trained(name: str, optimizer: Any, values: Iterable[object]) -> None:
    """What ``state.name`` trains in shards is in the state, with the buffers beside it. Raises Invalid."""
    models = [value for value in values if isinstance(value, torch.nn.Module)]
    known = {id(each) for model in models for each in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise Invalid(
                    f"state.{name} trains {_named(optimizer, parameter)}, which is in no model of the state: a commit"
                    " would have neither its weights nor its model's buffers, as running statistics; add the model, as"
                    " in TorchState(model=model, ...)"
                )


def check_optimizers(values: Mapping[str, Any]) -> None:
    """Whoever joins goes on with the same moments. Raises Invalid."""
    known = set(map(id, values.values()))
    for name, shards in values.items():
        if not isinstance(shards, Shards) or not shards.exact:
            continue
        if any(id(each) not in known for each in shards.optimizers):
            gc.collect()  # one that is gone must not count until the collector comes
        for each in shards.optimizers:
            if id(each) not in known:
                raise Invalid(
                    f"an optimizer, {type(each).__name__}, is in no state, and its gradients are added up over"
                    f" state.{name}: a worker that joins would begin with other moments; add it, as in TorchState(...,"
                    " optimizer=optimizer, shards=shards)"
                )


def check_schedules(values: Mapping[str, Any]) -> None:
    """Whoever joins goes on in the middle of a schedule. Raises Invalid."""
    if not any(isinstance(value, Shards) and value.exact for value in values.values()):
        return
    followed = {id(getattr(value, "optimizer", None)) for value in values.values()}
    for name, value in values.items():
        step = getattr(value, "step", None)
        if getattr(step, "_wrapped_by_lr_sched", False) and id(value) not in followed:
            raise Invalid(
                f"a scheduler sets the learning rate of state.{name} and is in no state, so a worker that joins would"
                " begin its schedule anew; add it, as in TorchState(..., scheduler=scheduler)"
            )


def _named(optimizer: Any, parameter: torch.Tensor) -> str:
    """As a wrapped optimizer was told; any other knows no names."""
    ask = getattr(optimizer, "parameter_name", None)
    return str(ask(parameter)) if ask else f"a parameter of shape {list(parameter.shape)}"
