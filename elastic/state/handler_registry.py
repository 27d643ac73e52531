"""Registry of handlers by type. User-defined handlers can be put first: see `set_handler_registry`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic.data.loader import DataLoader
from elastic.data.sampler import ElasticSampler
from elastic.diloco.diloco import DiLoCo
from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.sharding import fsdp2, unsupported_sharding, zero
from elastic.state.fully_sharded.island_shards import ShardedDiLoCoHandler
from elastic.state.fully_sharded.sharded_handlers import (
    FullyShardedHandler,
    ShardedOptimizerHandler,
    trains_shards,
)
from elastic.state.fully_sharded.zero_handlers import DividedOptimizerHandler, ZeroOptimizerHandler
from elastic.state.handlers.data_parallel import (
    DataParallelHandler,
    HolderHandler,
    as_written,
    held_in,
)
from elastic.state.handlers.diloco_state import DiLoCoStateHandler
from elastic.state.handlers.loader_state import LoaderStateHandler
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.part import (
    Carried,
    CarriedPart,
    Part,
    SamplerStateHandler,
    ScalerPart,
    ShardsStateHandler,
    StateHandler,
)
from elastic.state.handlers.schedule_state import SchedulePart

Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (DistributedDataParallel, DataParallelHandler),
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (Shards, ShardsStateHandler),
    (DiLoCo, DiLoCoStateHandler),
    (Carried, CarriedPart),
    (DataLoader, LoaderStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulePart),
    (torch.amp.GradScaler, ScalerPart),
]


def get_handler_registry() -> Registry:
    """Return the registry: pairs of a type and the handler class for its instances. The first matching pair is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry for states that are created later."""
    global _registry
    _registry = registry


def handler_for(name: str, value: Any) -> StateHandler | None:
    """Return a new handler for ``value``, or None if no handler supports its type. A `Part` also saves the value."""
    unsupported_sharding.check_value(name, value)
    for kind, handler in get_handler_registry():
        if isinstance(as_written(value), kind):
            if handler is ModelStateHandler and held_in(value):
                handler = HolderHandler
            if handler is ModelStateHandler and fsdp2.sharded_params(value):
                handler = FullyShardedHandler
            elif handler is DiLoCoStateHandler and value.sharded is not None:
                handler = ShardedDiLoCoHandler
            elif handler is OptimizerStateHandler and zero.is_zero(value):
                handler = ZeroOptimizerHandler
            elif handler is OptimizerStateHandler and zero.is_divided(value):
                handler = DividedOptimizerHandler
            elif handler is OptimizerStateHandler and trains_shards(value):
                handler = ShardedOptimizerHandler
            if issubclass(handler, Part) and handler.__init__ is Part.__init__:
                return handler(value, name)
            made = handler(value)  # user-defined handlers have Horovod's signature
            if isinstance(made, Part):
                made.name = name
            return made
    return None


def refuse_handled(name: str, value: Any) -> None:
    """Raise Invalid for values that only a `HandledState` can restore.

    On restore, other states would replace the object with a copy that the script does not use.
    """
    if isinstance(as_written(value), tuple(kind for kind, _ in get_handler_registry())):
        raise Invalid(
            f"state.{name} is a {type(value).__name__}, and a restore would replace it with an unused copy: pass"
            " it to a TorchState together with all other values"
        )


_TRAINED = (torch.nn.Parameter, torch.nn.Module, torch.optim.Optimizer, DiLoCo, Shards)
_LOOKED_AT = 64  # maximum number of entries to check in a collection


def refuse_hidden(name: str, value: Any, handlers: Iterable[StateHandler]) -> None:
    """Raise Invalid for parameters and for collections of models or optimizers that have no handler.

    A restore would replace them with copies, which the script does not train.

    Args:
        handlers: the handlers of the state. Collections may contain values that have one of these handlers.
    """
    inside: Iterable[Any] = ()
    if isinstance(value, torch.nn.Parameter):
        inside = [value]
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    else:  # fast path, because this runs at each assignment, usually of a number
        return
    known = {id(handler.value) for handler in handlers}
    for each in itertools.islice(inside, _LOOKED_AT):
        if isinstance(each, _TRAINED) and id(each) not in known:
            what = "is" if each is value else f"is a {type(value).__name__} that holds"
            remedy = (
                f"each {type(each).__name__} as a separate keyword argument"
                if isinstance(each, torch.optim.Optimizer | DiLoCo | Shards)
                else (
                    "each model as a separate keyword argument or in a torch.nn.ModuleList, and parameters in a"
                    " torch.nn.ParameterList"
                )
            )
            raise Invalid(
                f"state.{name} {what} a {type(each).__name__}, and a restore would replace it with an untrained"
                f" copy: pass {remedy}"
            )
