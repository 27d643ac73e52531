"""Check that sharded models and optimizers, and DDP models outside the state, are not trained in a later world.

Each optimizer is checked once per world, before its first update.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.errors import Fixed
from elastic.exact import shards
from elastic.runtime import lifecycle
from elastic.sharding import unsupported_sharding
from elastic.torch_backend import compile_exclusion, data_parallel_models

_installed: list[Any] = []
# generation of each optimizer's last check (_seen) and, with DTensor parameters, of its first check (_since)
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_since: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def begin(values: Iterable[object]) -> None:
    """Install the check at the start of elastic training.

    Args:
        values: models, optimizers and similar objects of the state.

    Raises:
        NotElastic: the process has a sharded or replicated module, or a pipeline stage, outside of the state.
    """
    values = list(values)
    data_parallel_models.begin(values)
    unsupported_sharding.refuse_outside(values)
    if not _installed:
        compile_exclusion.keep_function_out(_before_step)
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    rt = lifecycle.active()
    if rt is None or not rt.elastic or rt.provisional or _seen.get(optimizer) == rt.generation:
        return
    check(optimizer, rt.generation, rt.place.size)
    _seen[optimizer] = rt.generation


def check(optimizer: torch.optim.Optimizer, generation: int, size: int) -> None:
    """Check an optimizer before its first update in a world of ``size`` workers.

    Raises:
        NotElastic: the optimizer is sharded in a way that cannot follow the world, or trains a model in
            DistributedDataParallel that is in no state.
    """
    data_parallel_models.check(optimizer)
    unsupported_sharding.check_world()
    kind = unsupported_sharding.of_optimizer(optimizer)
    if kind is not None and shards.in_use():
        raise unsupported_sharding.refuse_micro_batches(optimizer, kind)
    what = f"the model that {type(optimizer).__name__} trains"
    if kind is Fixed.OPTIMIZER:
        if unsupported_sharding.is_followed(optimizer):
            return
        what = "an optimizer of this script"
    elif kind is Fixed.PARAMETERS:
        if unsupported_sharding.follows_island(optimizer):
            return
        if unsupported_sharding.all_followed(optimizer) and _spans(optimizer, size):
            if not unsupported_sharding.is_followed(optimizer):
                raise unsupported_sharding.refuse_unfollowed(optimizer)
            return
        if unsupported_sharding.any_fully_sharded():
            kind = Fixed.MODULE
        elif _since.setdefault(optimizer, generation) == generation and _spans(optimizer, size):
            return  # valid: tensor-parallel layers that were created in this world
        else:
            what += ", which was made for an earlier world,"
    if kind is not None:
        raise unsupported_sharding.refuse(what, kind)


def _spans(optimizer: torch.optim.Optimizer, size: int) -> bool:
    meshes = {
        id(mesh): mesh
        for group in optimizer.param_groups
        for each in group["params"]
        if (mesh := getattr(each, "device_mesh", None)) is not None
    }
    return all(_root(mesh).size() == size for mesh in meshes.values())


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    resources: Any = device_mesh
    return resources._mesh_resources.get_root_mesh(mesh)  # API of torch 2.8
