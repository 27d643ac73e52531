"""Detection of optimizers outside a state that step the parameters of a sharded optimizer of the state.

A script may create a new optimizer after it has created the state, and train with the new one. Commits would then
contain the unused entries of the old optimizer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.torch_backend import compile_exclusion

_installed: list[Any] = []
_followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# optimizers outside of sharded states that have stepped since the last sharded state was created
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def observe(optimizer: torch.optim.Optimizer) -> None:
    """Start recording which optimizers take steps, except those passed to this function.

    Args:
        optimizer: a sharded optimizer, or an optimizer of sharded parameters.
    """
    _followed.add(optimizer)
    _stepped.clear()
    if not _installed:
        compile_exclusion.keep_function_out(_before_step)
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer not in _followed and not _is_inner(optimizer):
        _stepped.add(optimizer)


def _is_inner(optimizer: torch.optim.Optimizer) -> bool:
    return any(getattr(each, "optim", None) is optimizer for each in [*_followed, *_stepped])


def replacement_of(
    optimizer: torch.optim.Optimizer, in_state: Collection[int]
) -> tuple[torch.optim.Optimizer, torch.Tensor] | None:
    """Find another optimizer that has stepped a parameter of this optimizer. Return it and the parameter, or None.

    Args:
        in_state: IDs (``id()``) of the state's values. Optimizers among these values are ignored.
    """
    if (found := _found(optimizer, in_state)) is None:
        return None
    del found
    gc.collect()  # destroy unreachable optimizers, which must not be reported
    return _found(optimizer, in_state)


def _found(
    optimizer: torch.optim.Optimizer, in_state: Collection[int]
) -> tuple[torch.optim.Optimizer, torch.Tensor] | None:
    others = [each for each in [*_stepped] if id(each) not in in_state]
    if not others:
        return None
    ours = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for other in others:
        for group in other.param_groups:
            for parameter in group["params"]:
                if id(parameter) in ours:
                    return other, parameter
    return None
