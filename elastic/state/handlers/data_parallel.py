"""Handlers of ``DistributedDataParallel`` in a state, which commit its module and rebuild its reducer for each world.

The C++ reducer of DDP holds gradient counts and buckets of the previous world, in an order that a joining worker does
not have. In each world, every rank therefore creates a new reducer, as DDP's constructor does, without a collective.
All reducers start with equal buckets and agree on their order after the first step, as at the start of a job.
Communication hooks and the static graph setting are applied again.

The new reducer has the same parameters as the first one, including parameters that are temporarily frozen. Other
parameters that the module trains, such as those added or unfrozen later, are not reduced, and would differ between
ranks from the next step on. The next commit therefore raises NotReduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import NotReduced
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.torch_backend import data_parallel_models

_torch: Any = distributed  # torch's stubs lack methods that DDP itself calls
# parameters for which the reducer of each model was built
_reduced: weakref.WeakKeyDictionary[DistributedDataParallel, list[torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)


class ReplicasHandler(ModelStateHandler):
    """Handler of a model that is, or contains, DistributedDataParallel modules."""

    def replicas(self) -> Iterable[DistributedDataParallel]:
        """Return the DistributedDataParallel modules in the model."""
        raise NotImplementedError

    def _adopt_value(self) -> None:
        super()._adopt_value()
        for each in self.replicas():
            data_parallel_models.follow(each)
            if each not in _reduced:
                _reduced[each] = _parameters(each)
                self._check(each, built_with=_number_reduced(each))
        self._looked_at: tuple[Any, Any] | None = None

    def live(self) -> tuple[Any, dict[str, torch.Tensor]]:
        structure, tensors = super().live()
        names, frozen = structure["names"], structure["frozen"]
        if (
            self._looked_at is None
            or self._looked_at[0] is not names
            or self._looked_at[1] != frozen
        ):
            self._check_all()
            self._looked_at = names, frozen
        return structure, tensors

    def reset(self) -> None:
        self._check_all()
        for each in self.replicas():
            rebuild_reducer(each)

    def _check_all(self) -> None:
        for each in self.replicas():
            self._check(each)

    def _check(self, model: DistributedDataParallel, built_with: int | None = None) -> None:
        """Check that the reducer reduces all parameters that are trained.

        Args:
            model: model to check.
            built_with: number of parameters in its reducer, which may be smaller than the number of known parameters.

        Raises:
            NotReduced: a trained parameter is not reduced.
        """
        known = {id(each) for each in _reduced[model][:built_with]}
        late = next((each for each in _parameters(model) if id(each) not in known), None)
        if late is None:
            return
        name = next(name for name, each in self.model.named_parameters() if each is late)
        raise NotReduced(
            f"{self.full_name(name)} became trainable after DistributedDataParallel was built, so its gradient"
            " is not reduced, and ranks would diverge: change parameters before you build"
            " DistributedDataParallel, or build a new one and pass it to the state",
            self.full_name(name),
        )


class DataParallelHandler(ReplicasHandler):
    """Handler of a DistributedDataParallel. Tensor names are those in ``ddp.module``."""

    value: DistributedDataParallel

    def replicas(self) -> Iterable[DistributedDataParallel]:
        return [as_written(self.value)]

    @property
    def model(self) -> torch.nn.Module:
        module: torch.nn.Module = as_written(self.value).module
        return module

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        super().place(structure, fresh, own, restoring=restoring)
        # Wrapping modules get the same training mode, as after train().
        for each in takewhile(lambda each: each is not self.model, self.value.modules()):
            each.training = self.model.training


class HolderHandler(ReplicasHandler):
    """Handler of a module of the script that contains ``DistributedDataParallel`` modules."""

    def replicas(self) -> Iterable[DistributedDataParallel]:
        return held_in(self.value)


def held_in(value: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules in ``value``, which may be one itself."""
    return [each for each in value.modules() if isinstance(each, DistributedDataParallel)]


def as_written(value: Any) -> Any:
    """Return the module inside a wrapper that Fabric's ``setup`` or ``torch.compile`` has created."""
    if isinstance(value, torch.nn.Module):
        for name in ("_forward_module", "_orig_mod"):
            inner = getattr(value, name, None)
            if isinstance(inner, torch.nn.Module):
                return as_written(inner)
    return value


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Create a new reducer for a DistributedDataParallel, after the world has changed.

    This function needs no collective, because parameters are in module order, which is the same on all ranks.
    """
    ddp: Any = model
    hook_name = ddp.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
    # Dropping the reducer also removes its hooks on the parameters.
    ddp.reducer = ddp.logger = None
    there = {id(each) for each in ddp.module.parameters()}
    frozen = [
        each for each in _reduced.get(model, ()) if not each.requires_grad and id(each) in there
    ]
    # The first reducer also contained the parameters that were frozen later, so unfreeze these while the new one is
    # built.
    for each in frozen:
        each.requires_grad_(True)
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    for each in frozen:
        each.requires_grad_(False)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    for hook, state in ddp._comm_hooks:
        _forget(state)
        _torch._register_comm_hook(ddp.reducer, state, hook)
    if hook_name == str(_torch.BuiltinCommHookType.FP16_COMPRESS):
        # The built-in C++ hook accepts only results of torch's own process groups. This Python hook computes the same
        # values.
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)


def _parameters(model: DistributedDataParallel) -> list[torch.Tensor]:
    ddp: Any = model
    found: list[torch.Tensor] = ddp._build_params_for_reducer()[0]
    return found


def _number_reduced(model: DistributedDataParallel) -> int | None:
    """Return the number of parameters in the model's reducer, or None if torch does not provide it."""
    ddp: Any = model
    found: int | None = ddp.logger._get_ddp_logging_data().ints_map.get("num_parameter_tensors")
    return found


def _forget(state: Any) -> None:
    """Reset a hook's state, which refers to buckets that no longer exist.

    PowerSGD restarts on all ranks at the same step.
    """
    if type(state).__name__ == "PowerSGDState":
        state.iter = 0
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()
        state.rng = type(state.rng)(0)
