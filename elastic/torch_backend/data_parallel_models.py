"""Detection of ``DistributedDataParallel`` models whose reducers belong to an earlier world.

A state rebuilds the reducers of its models in each world. Another model's reducer keeps the gradient counts and buckets
of the world in which it was built, so a rank that has just joined would disagree with the other ranks.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import Fixed, NotElastic
from elastic.torch_backend.following_group import FollowingGroup
from elastic.torch_backend.group_names import names

_ddp: Any = DistributedDataParallel
_build: Any = _ddp._ddp_init_helper
# Generation in which the reducer was built, or 0 before elastic.run.
_built: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()
# models whose reducers a state rebuilds
_followed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def replace() -> None:
    """Patch DDP to record each model whose reducer is built later. Idempotent."""
    _ddp._ddp_init_helper = _build_reducer


@functools.wraps(_build)
def _build_reducer(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
    _retire_others(model)
    _build(model, *args, **options)
    group = model.process_group
    if isinstance(group, FollowingGroup) and group.ranks is None:
        _built[model] = names.generation


def _retire_others(model: DistributedDataParallel) -> None:
    """Remove the hooks of earlier worlds' reducers from the parameters of this model.

    A script that creates its DDP model in the function under elastic.run has dropped the earlier models, but a
    reference cycle can keep them alive. The old and the new reducer would then both reduce each gradient.
    """
    ours = {id(each) for each in model.parameters()}
    for other, generation in list(_built.items()):
        if other is model or generation == names.generation or other in _followed:
            continue
        if any(id(each) in ours for each in other.parameters()):
            untyped: Any = other
            untyped.reducer._remove_autograd_hooks()
            untyped.forward = _retired
            del _built[other]


def _retired(*_: Any, **__: Any) -> NoReturn:
    raise NotElastic(
        "the DistributedDataParallel object of an earlier world was called, but the script has created another one for"
        " the same parameters: call the new object, or create one object before elastic.run and pass it to the state",
        Fixed.REPLICA,
    )


def follow(model: DistributedDataParallel) -> None:
    """Record that a state rebuilds this model's reducer in each world."""
    _followed.add(model)


def begin(values: Iterable[object]) -> None:
    """Forget, at the start of elastic training, the models that are not among these values of the state."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    inside = {id(each) for module in modules for each in module.modules()}
    for model in list(_followed):
        if id(model) not in inside:
            _followed.discard(model)


def check(optimizer: torch.optim.Optimizer) -> None:
    """Check the models of an optimizer before its first update in a world.

    Raises:
        NotElastic: the optimizer trains a model that is in no state and was built in an earlier world.
    """
    if not _trains_unfollowed(optimizer):
        return
    gc.collect()  # Collect garbage, because a dropped model may still exist in a reference cycle.
    if _trains_unfollowed(optimizer):
        raise NotElastic(
            f"{type(optimizer).__name__} trains a model in DistributedDataParallel that is in no state. A state"
            " rebuilds the reducer of its models in each world, and sends their parameters to workers that join:"
            " pass the DistributedDataParallel object to the state, as in TorchState(model=model, ...)",
            Fixed.REPLICA,
        )


def _trains_unfollowed(optimizer: torch.optim.Optimizer) -> bool:
    reduced = {
        id(parameter)
        for model, generation in list(_built.items())
        if generation != names.generation and model not in _followed
        for parameter in model.parameters()
    }
    return bool(reduced) and any(
        id(each) in reduced for group in optimizer.param_groups for each in group["params"]
    )
