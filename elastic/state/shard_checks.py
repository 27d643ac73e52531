"""Verification that a state with shards contains all values that are needed to resume a run exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.sharding import fsdp2


def names_of(values: Mapping[str, Any]) -> dict[int, str]:
    """Return the parameter names of a state's models, such as ``model.0.weight``, keyed by ``id(parameter)``."""
    return {
        id(parameter): f"{name}.{key}"
        for name, value in values.items()
        if isinstance(value, torch.nn.Module)
        for key, parameter in value.named_parameters()
    }


def check_trained(
    name: str, optimizer: Any, values: Iterable[object], names: Mapping[int, str] | None = None
) -> None:
    """Check that all parameters that the optimizer ``state.<name>`` trains belong to models in the state.

    Args:
        names: names of current and former parameters of the state's models, keyed by ``id(parameter)``.

    Raises:
        Invalid: a trained parameter does not belong to a model in the state.
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
        Invalid: an optimizer that uses the state's shards is not in the state.
    """
    known = set(map(id, values.values()))
    for name, shards in values.items():
        if not isinstance(shards, Shards) or not shards.exact:
            continue
        if any(id(each) not in known for each in shards.optimizers):
            gc.collect()  # destroy unreachable optimizers, which need not be in the state
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
    """Return the parameter's name from ``names`` or the optimizer. Without a name, describe its shape."""
    ask = getattr(optimizer, "parameter_name", None)
    if id(parameter) in names:
        return names[id(parameter)]
    return str(ask(parameter)) if ask else f"a parameter of shape {list(parameter.shape)}"
