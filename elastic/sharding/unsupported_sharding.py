"""Detection of models and optimizers with a sharding that states do not support, and the errors for them."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elastic.collectives.dtensor import is_dtensor
from elastic.errors import Fixed, Invalid, NotElastic
from elastic.runtime import lifecycle
from elastic.runtime.live_objects import live_objects
from elastic.sharding import fsdp2, zero

_ADVICE = (
    "use DistributedDataParallel or elastic.DistributedOptimizer with a plain optimizer, or, in a job of a fixed size"
    " (without --min-np), leave it out of the state and save it with torch.distributed.checkpoint"
)
_INTO_STATE = {
    Fixed.MODULE: "put a model that fully_shard was applied to into elastic.TorchState, ",
    Fixed.OPTIMIZER: "put it into elastic.TorchState together with the model that it trains, ",
}
_ADVICE_SHARDED = (
    "apply fully_shard to layers and model with the default mesh, or one of init_device_mesh over all ranks, of (shard)"
    " or (replicate, shard), or, in a job of a fixed size (without --min-np), leave the model out of the state"
)
_ADVICE_ZERO = (
    "use ZeroRedundancyOptimizer(parameters, optimizer_class, **options) with the process group of all ranks, or, in a"
    " job of a fixed size (without --min-np), leave it out of the state"
)
# Models in the state that was passed to elastic.run. Only objects in this state follow changes of the world.
_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_followed: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP states of these models
_followed_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# optimizers whose parameters are sharded within an island, and follow changes of the world with it
_of_islands: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# two-dimensional meshes that the script has created for these models
_followed_meshes: list[Any] = []
# sharded modules outside the state, and pipeline stages, that were created in an earlier world
_stale: weakref.WeakSet[Any] = weakref.WeakSet()
_WHY = {
    Fixed.MODULE: (
        "is fully sharded (FSDP): each rank has a part of its parameters, and the part of a lost rank would be lost"
    ),
    Fixed.PARAMETERS: (
        "has DTensor parameters: each rank has a part of them, and the part of a lost rank would be lost"
    ),
    Fixed.OPTIMIZER: (
        "is sharded (ZeRO): each rank has a part of its state, and the part of a lost rank would be lost"
    ),
}


def of_module(module: torch.nn.Module) -> Fixed | None:
    """Return the kind of sharding of a module, or None if it is not sharded."""
    fully = _classes("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    if fully and any(isinstance(each, fully) for each in module.modules()):
        return Fixed.MODULE
    return of_parameters(itertools.chain(module.parameters(), module.buffers()))


def of_optimizer(optimizer: torch.optim.Optimizer) -> Fixed | None:
    """Return the kind of sharding of an optimizer or its parameters, or None if they are not sharded."""
    if zero.is_zero(optimizer) or zero.is_divided(optimizer):
        return Fixed.OPTIMIZER
    return of_parameters(each for group in optimizer.param_groups for each in group["params"])


def of_parameters(parameters: Iterable[Any]) -> Fixed | None:
    """Return the kind of sharding of parameters, or None if none of them is sharded."""
    tensors = _classes("torch.distributed.tensor", "DTensor")
    found = None
    for each in parameters:
        # FSDP1 sets these private attributes on a flat parameter, and on a parameter that is a view of one.
        if hasattr(each, "_is_flat_param") or getattr(each, "_fsdp_flattened", False):
            return Fixed.MODULE
        if tensors and isinstance(each, tensors):
            found = Fixed.PARAMETERS
    return found


def refuse_outside(values: Iterable[object]) -> None:
    """Record the objects in the state that was passed to elastic.run, and reject sharded models outside it.

    Raises:
        NotElastic: the process has a model outside the state that torch has sharded, replicated or divided into
            pipeline stages.
    """
    _follow(values)
    if any_fully_sharded() or _exists(_fsdp1_modules):
        raise refuse("a module of this script", Fixed.MODULE)
    if _exists(_replicated_modules):
        raise refuse_replicated("a module of this script")
    if _exists(_pipeline_stages):
        raise refuse_pipeline("a module of this script")


def any_fully_sharded() -> bool:
    """Return whether this process has a fully sharded module outside the state."""
    return _exists(_unfollowed)


def enter_world() -> None:
    """Record the objects outside the state that belong to an earlier world.

    This function is called when a new world begins.
    """
    _stale.update([*_unfollowed(), *_pipeline_stages()])


def check_world() -> None:
    """Check for sharded models of an earlier world, and for pipeline stages in the state.

    This function is called before an update.

    Raises:
        NotElastic: a sharded model or a pipeline stage was created in an earlier world, or the state has the module of
            a pipeline stage.
    """
    if _exists(lambda: list(_stale)):
        raise NotElastic(
            "a module of this script was sharded in an earlier world, and does not follow the current one: create it at"
            " the beginning of the function under elastic.run without keeping the previous one, or add it to"
            " elastic.TorchState",
            Fixed.MODULE,
        )
    if is_pipelined(_models):
        raise refuse_pipeline("a model of the state")


def is_pipelined(models: Iterable[torch.nn.Module]) -> bool:
    """Return whether a pipeline stage of this process trains a parameter of these models."""
    trained = {id(each) for stage in _pipeline_stages() for each in stage.submod.parameters()}
    return bool(trained) and any(
        id(each) in trained for model in models for each in model.parameters()
    )


def _exists(find: Callable[[], list[Any]]) -> bool:
    if not find():
        return False
    # An object that the script has dropped may still exist in a reference cycle, so collect garbage and look again.
    gc.collect()
    return bool(find())


def _unfollowed() -> list[Any]:
    kinds = _classes("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
    known: Any = sys.modules.get("torch.distributed._composable_state")
    found = [each() for each in known._module_state_mapping.values()] if kinds and known else []
    return [each for each in found if isinstance(each, kinds) and each not in _followed]


def _fsdp1_modules() -> list[Any]:
    return live_objects(*_classes("torch.distributed.fsdp", "FullyShardedDataParallel"))


def _is_replicated(module: torch.nn.Module) -> bool:
    return isinstance(module, _classes("torch.distributed._composable.replicate", "DDP"))


def _replicated_modules() -> list[Any]:
    found: list[Any] = []
    for kind in _classes("torch.distributed._composable.replicate", "DDP"):
        # torch creates a subclass of DDP for each class of modules to which replicate() is applied.
        found += live_objects(*kind.__subclasses__())
    return found


def _pipeline_stages() -> list[Any]:
    return live_objects(*_classes("torch.distributed.pipelining.stage", "_PipelineStageBase"))


def _follow(values: Iterable[object]) -> None:
    for known in (_models, _followed, _followed_optimizers, _followed_meshes, _stale):
        known.clear()
    for value in values:
        if isinstance(value, torch.nn.Module):
            _models.add(value)
            _followed.update(fsdp2.sharded_states(value))
            mesh = fsdp2.mesh_of(value) if fsdp2.groups(value) else None
            if mesh is not None and mesh.ndim == 2:
                _followed_meshes.append(mesh)
        elif isinstance(value, torch.optim.Optimizer):
            _followed_optimizers.add(value)


def least_shards(models: Mapping[str, torch.nn.Module], given: Any) -> int | None:
    """Return the minimum number of shards for these models in any world.

    This is ``given`` or, for a mesh of replicas by shards, its number of shards. None means that each rank has its own
    shard.

    Args:
        models: fully sharded models, by name.
        given: argument of ``TorchState(least_shards=...)``.

    Raises:
        Invalid: the argument is invalid.
        NotElastic: the models have different meshes.
    """
    if not models and given is None:
        return None
    if not models:
        raise Invalid(
            "least_shards requires a model with fully_shard, but the state has no such model: omit least_shards"
        )
    meshes = [fsdp2.mesh_of(model) for model in models.values()]
    if any(mesh.mesh.tolist() != meshes[0].mesh.tolist() for mesh in meshes):
        raise NotElastic(
            f"state.{' and state.'.join(models)} are sharded over different meshes: pass the same mesh to"
            " fully_shard for all models of a state",
            Fixed.MODULE,
        )
    if given is None and meshes[0].ndim == 1:
        return None
    least = meshes[0].size(1) if given is None else given
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise Invalid(
            f"least_shards is {least!r}: pass the smallest number of shards for which a worker has enough memory"
        )
    rt = lifecycle.active()
    if rt is not None and rt.elastic and rt.env.workers_min < least:
        raise Invalid(
            f"--min-np allows a world of {rt.env.workers_min} workers, but the state needs at least {least}"
            f" shards (least_shards, or the mesh given to fully_shard): pass --min-np {least}, or a lower"
            " least_shards if each worker has enough memory"
        )
    return least


def followed_groups() -> list[tuple[int, ...]]:
    """Return the ranks of each process group that exists only for the mesh of a model in the state."""
    return [line for mesh in _followed_meshes for line in fsdp2.lines_of(mesh)]


def is_followed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this optimizer is in the state that was passed to elastic.run."""
    return optimizer in _followed_optimizers


def follow_island(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Record optimizers whose parameters are sharded over the mesh of an island, which moves them to its next mesh."""
    _of_islands.update(optimizers)


def follows_island(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer was passed to `follow_island`."""
    return optimizer in _of_islands


def refuse_unfollowed(optimizer: torch.optim.Optimizer) -> NotElastic:
    """Return the error for an optimizer outside the state that trains a fully sharded model in the state."""
    return NotElastic(
        f"{type(optimizer).__name__} trains a fully sharded model of the state, but is not in the state, so its"
        " entries would keep the mesh of this world: add the optimizer, as in TorchState(model=model,"
        " optimizer=optimizer)",
        Fixed.OPTIMIZER,
    )


def refuse_micro_batches(optimizer: torch.optim.Optimizer, kind: Fixed) -> NotElastic:
    """Return the error for a script that combines elastic.Shards with a sharded optimizer or model."""
    return NotElastic(
        f"{type(optimizer).__name__} can't be combined with elastic.Shards: it is sharded, or trains a sharded model,"
        " so gradients are reduced in each backward pass, but ranks compute different numbers of shards. Omit Shards,"
        " or use an optimizer and a model that are not sharded",
        kind,
    )


def all_followed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all DTensors that an optimizer trains are parameters of models in the state."""
    ours = {
        id(param.sharded_param)
        for state in list(_followed)
        for group in state._fsdp_param_groups
        for param in group.fsdp_params
    }
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    return all(id(each) in ours for each in trained if is_dtensor(each))


def refuse(what: str, kind: Fixed) -> NotElastic:
    """Return the error for an object with an unsupported kind of sharding. ``what`` names it, as in ``state.model``."""
    return NotElastic(f"{what} {_WHY[kind]}; {_INTO_STATE.get(kind, '')}{_ADVICE}", kind)


def refuse_replicated(what: str) -> NotElastic:
    """Return the error for a module to which torch's ``replicate()`` was applied."""
    return NotElastic(
        f"{what} is replicated by torch's replicate(), whose reducer belongs to one world: wrap the model in"
        " DistributedDataParallel, and add it to elastic.TorchState",
        Fixed.REPLICA,
    )


def refuse_pipeline(what: str) -> NotElastic:
    """Return the error for a module that is a stage of a pipeline."""
    return NotElastic(
        f"{what} is a stage of a pipeline, so each rank has other parameters, and those of a lost rank would be lost:"
        " use fully_shard, or DistributedDataParallel with the complete model, or, in a job of a fixed size (without"
        " --min-np), leave the model out of the state",
        Fixed.PARAMETERS,
    )


def refuse_optimizer(name: str) -> NotElastic:
    """Return the error for an optimizer in a state that does not contain the models that it trains."""
    if any_fully_sharded():
        return NotElastic(
            f"state.{name} trains a fully sharded model that is not in the state: add the model, as in"
            " TorchState(model=model, optimizer=optimizer)",
            Fixed.MODULE,
        )
    return refuse(f"the model that state.{name} trains", Fixed.PARAMETERS)


def refuse_stale(name: str, parameter: torch.Tensor) -> NotElastic:
    """Return the error for an optimizer that trains a parameter which does not belong to any model in the state."""
    return NotElastic(
        f"state.{name} trains a parameter of shape {list(parameter.shape)} that is in no model of the state."
        " fully_shard replaces parameters, so an optimizer created earlier trains none of them: create the optimizer"
        " after fully_shard, and add all models that it trains to the state",
        Fixed.PARAMETERS,
    )


def refuse_replaced(name: str, other: torch.optim.Optimizer, parameter: str) -> NotElastic:
    """Return the error for an optimizer outside the state that has stepped parameters of the sharded ``state.name``."""
    return NotElastic(
        f"{type(other).__name__}, which is not in the state, has stepped {parameter}, which state.{name} trains. A"
        f" commit contains only the entries of state.{name}, so training would be wrong after a failure: step"
        f" state.{name}, or create a new state with the new optimizer, as in TorchState(..., {name}=...)",
        Fixed.OPTIMIZER,
    )


def refuse_together(model: str, optimizer: str) -> NotElastic:
    """Return the error for a state with both a fully sharded model and a ZeRO optimizer."""
    return NotElastic(
        f"state.{model} is fully sharded and state.{optimizer} is sharded with ZeRO, but commits can't contain both:"
        " shard the models of both with fully_shard, or none",
        Fixed.OPTIMIZER,
    )


def refuse_late(name: str) -> NotElastic:
    """Return the error for assigning to ``state.name`` if its current or new value is sharded."""
    return NotElastic(
        f"state.{name} can't be replaced, because its old or new value is a sharded model or optimizer, and commits"
        f" contain the shards with which the state was created: create a new state, as in TorchState({name}=...)",
        Fixed.MODULE,
    )


def of_value(value: object) -> Fixed | None:
    """Return the kind of sharding of a model or an optimizer, or None if it is not sharded."""
    if isinstance(value, torch.nn.Module):
        return of_module(value)
    return of_optimizer(value) if isinstance(value, torch.optim.Optimizer) else None


def check_trainer(
    trainer: str,
    optimizers: Iterable[torch.optim.Optimizer],
    models: Iterable[torch.nn.Module] = (),
) -> None:
    """Raise an error if a trainer has sharded models or optimizers, because it saves and loads only complete ones.

    Raises:
        NotElastic: a model or an optimizer is sharded.
    """
    for model in models:
        kind = of_module(model)
        if kind is not None:
            raise NotElastic(
                f"the model is sharded ({kind.value}), which is not supported in an elastic job of {trainer}:"
                " omit fully_shard and parallelize_module, or write a training loop with elastic.TorchState",
                kind,
            )
    if any(of_optimizer(each) is Fixed.OPTIMIZER for each in optimizers):
        raise NotElastic(
            f"the optimizer is sharded with ZeRO, which is not supported in an elastic job of {trainer}: use a"
            " plain optimizer, or write a training loop with elastic.TorchState",
            Fixed.OPTIMIZER,
        )


def check_value(name: str, value: Any) -> None:
    """Raise NotElastic if the sharding of a state's value is not supported."""
    kind = None
    if isinstance(value, torch.nn.Module):
        if any(map(_is_replicated, value.modules())):
            raise refuse_replicated(f"state.{name}")
        if is_pipelined([value]):
            raise refuse_pipeline(f"state.{name}")
        kind = of_module(value)
        fully = kind is Fixed.MODULE and fsdp2.sharded_states(value)
        # Other versions of torch may name the parameters differently, so the check may find none.
        if fully and (fsdp2.untested_version() or fsdp2.sharded_params(value)):
            why = fsdp2.obstacle(value)
            if why is None:
                return
            raise NotElastic(f"state.{name} {why}; {_ADVICE_SHARDED}", Fixed.MODULE)
    elif isinstance(value, torch.optim.Optimizer):
        kind = of_optimizer(value)
        if kind is Fixed.PARAMETERS:
            # The optimizer itself is supported; the state checks its combination with models.
            return
        if kind is Fixed.OPTIMIZER:
            why = zero.obstacle(value) if zero.is_zero(value) else None
            if why is None:
                return
            raise NotElastic(f"state.{name} {why}; {_ADVICE_ZERO}", kind)
    elif isinstance(value, torch.Tensor):
        kind = of_parameters([value])
    if kind is not None:
        raise refuse(f"state.{name}", kind)


def check_within(what: str, tensors: Iterable[Any]) -> None:
    """Raise NotElastic if a value of a state contains a DTensor."""
    if of_parameters(each for each in tensors if isinstance(each, torch.Tensor)) is not None:
        raise NotElastic(
            f"{what} contains a DTensor, which differs between ranks, but state values must be the same on all"
            " ranks: store tensor.full_tensor() instead",
            Fixed.PARAMETERS,
        )


def _classes(module: str, *names: str) -> tuple[type, ...]:
    found = sys.modules.get(module)
    return tuple(each for name in names if isinstance(each := getattr(found, name, None), type))
