"""Checks that a state with shards contains everything needed to resume a run exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.sharding import fsdp2


def names_of(values: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the parameters of a state's models by the parameters' ids, as ``model.0.weight``."""
    return {
        id(parameter): f"{name}.{key}"
        for name, value in values.items()
        if isinstance(value, torch.nn.Module)
        for key, parameter in value.named_parameters()
    }


def check_trained(
    name: str, optimizer: Any, values: Iterable[object], names: Mapping[int, str] | None = None
) -> None:
    """Check that the models that ``state.name`` trains in shards are in the state.

    Raises:
        Invalid: a trained parameter does not belong to a model in the state.

    Args:
        names: names of parameters that are or were in models of the state, by their ids.
    """
    models = [value for value in values if isinstance(value, torch.nn.Module)]
    known = {id(each) for model in models for each in fsdp2.parameters(model)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise Invalid(
                    f"state.{name} trains {named(optimizer, parameter, names or {})}, but no model of the state"
                    " contains this parameter, so commits would lack its values: add the model, as in"
                    " TorchState(model=model, ...)"
                )


def check_optimizers(values: Mapping[str, Any]) -> None:
    """Check that joining workers receive all optimizer entries (moments).

    Raises:
        Invalid: an optimizer is not in the state.
    """
    known = set(map(id, values.values()))
    for name, shards in values.items():
        if not isinstance(shards, Shards) or not shards.exact:
            continue
        if any(id(each) not in known for each in shards.optimizers):
            gc.collect()  # ignore unreachable optimizers
        for each in shards.optimizers:
            if id(each) not in known:
                raise Invalid(
                    f"the state lacks the optimizer {type(each).__name__}, which uses state.{name}, so a joining"
                    " worker would start with different moments: add it, as in TorchState(...,"
                    " optimizer=optimizer, shards=shards)"
                )


def check_schedules(values: Mapping[str, Any]) -> None:
    """Check that joining workers resume learning rate schedules at the current step.

    Raises:
        Invalid: a scheduler is not in the state.
    """
    if not any(isinstance(value, Shards) and value.exact for value in values.values()):
        return
    followed = {id(getattr(value, "optimizer", None)) for value in values.values()}
    for name, value in values.items():
        step = getattr(value, "step", None)
        if getattr(step, "_wrapped_by_lr_sched", False) and id(value) not in followed:
            raise Invalid(
                f"the state lacks the scheduler of state.{name}, so a joining worker would restart the learning"
                " rate schedule: add it, as in TorchState(..., scheduler=scheduler)"
            )


def named(optimizer: Any, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """Return the parameter's name from ``names`` or from the optimizer, or else a description of the parameter."""
    ask = getattr(optimizer, "parameter_name", None)
    if id(parameter) in names:
        return names[id(parameter)]
    return str(ask(parameter)) if ask else f"a parameter of shape {list(parameter.shape)}"
