"""``DistributedDataParallel`` in a state: its module is committed, its reducer made anew for each world. Acts.

DDP's reducer, in C++, has counted gradients and filled buckets for a world that is over, in an order that a newcomer
does not know. So every member makes another one, as the constructor does, without a collective. They begin with equal
buckets again and agree on their order after the first step, as when a job starts. Hooks and a static graph are told.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from elastic.state.handlers.model_state import ModelStateHandler

_torch: Any = distributed  # its stubs lack what DDP itself calls


class DataParallelHandler(ModelStateHandler):
    """Its tensors have the names that they have in ``ddp.module``."""

    value: DistributedDataParallel

    @property
    def model(self) -> torch.nn.Module:
        module: torch.nn.Module = as_written(self.value).module
        return module

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        super().place(structure, fresh, own, restoring=restoring)
        # What is around it trains where it does, as after train().
        for each in takewhile(lambda each: each is not self.model, self.value.modules()):
            each.training = self.model.training

    def reset(self) -> None:
        rebuild_reducer(as_written(self.value))


class HolderHandler(ModelStateHandler):
    """A module of the script's own that has models in ``DistributedDataParallel``."""

    def reset(self) -> None:
        for each in held_in(self.value):
            rebuild_reducer(each)


def held_in(value: torch.nn.Module) -> list[DistributedDataParallel]:
    return [each for each in value.modules() if isinstance(each, DistributedDataParallel)]


def as_written(value: Any) -> Any:
    """What Fabric's ``setup`` or ``torch.compile`` has wrapped."""
    if isinstance(value, torch.nn.Module):
        for name in ("_forward_module", "_orig_mod"):
            inner = getattr(value, name, None)
            if isinstance(inner, torch.nn.Module):
                return as_written(inner)
    return value


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """For a world that has changed. No collective: the order of parameters is the module's, the same on all ranks."""
    ddp: Any = model
    hook_name = ddp.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
    # Its hooks on the parameters go with it.
    ddp.reducer = ddp.logger = None
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
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
        # That of C++ takes the results of torch's own process groups only; this one computes the same.
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)


def _forget(state: Any) -> None:
    """What a hook has kept of buckets that are no more. PowerSGD begins anew, on all members at the same step."""
    if type(state).__name__ == "PowerSGDState":
        state.iter = 0
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()
        state.rng = type(state.rng)(0)
