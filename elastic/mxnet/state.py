"""States of MXNet models: Gluon's blocks and trainers as parts of a state (see `elastic.state.handlers.part`)."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import torch
from mxnet.gluon.parameter import DeferredInitializationError

from elastic.errors import Invalid
from elastic.mxnet.bridge import view
from elastic.mxnet.parameters import only_array
from elastic.state import handler_registry
from elastic.state.handled_state import HandledState
from elastic.state.handlers.framework_variables import VariablesPart
from elastic.state.handlers.part import Part


class BlockPart(VariablesPart):
    """Gluon block as a part of a state. All its parameters must be initialized."""

    value: mx.gluon.Block

    def _adopt_value(self) -> None:
        try:
            self.named()
        except (DeferredInitializationError, RuntimeError) as error:
            raise Invalid(
                f"{self.what} has parameters without values: initialize the parameters, and call the network"
                " once on data, before you pass it to a state"
            ) from error

    def named(self) -> dict[str, torch.Tensor]:
        """Return views of the parameters.

        A key consists of the parameter's index and the last word of its name, because the layer numbers in MXNet's
        names depend on the layers created before.
        """
        return {
            f"{number}.{name.rpartition('_')[2]}": view(only_array(each), write=True)
            for number, (name, each) in enumerate(self.value.collect_params().items())
        }

    def assign(self, variable: torch.Tensor, value: torch.Tensor) -> None:
        variable.copy_(value)


class TrainerPart(Part):
    """Gluon trainer as a part of a state: counters, learning rates and per-parameter state of its optimizer."""

    value: mx.gluon.Trainer

    def layout(self) -> list[str]:
        return [f"{self.name} {type(self._optimizer).__name__}"]

    def seems_unchanged(self) -> bool:
        # torch does not detect writes by MXNet, so the value always counts as changed.
        return False

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        optimizer = self._optimizer
        tensors: dict[str, torch.Tensor] = {}
        kept = {
            index: _apart(state, f"{index}", tensors)
            for index, state in self.value._updaters[0].states.items()
        }
        return {
            "kept": kept,
            "counts": dict(optimizer._index_update_count),
            "num_update": optimizer.num_update,
            "lr": optimizer.lr,
            "wd": optimizer.wd,
            "lr_scheduler": optimizer.lr_scheduler,
        }, tensors

    def described(self, structure: Any, own: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return {**structure, "kept": dict(tensors)}

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        optimizer, updater = self._optimizer, self.value._updaters[0]
        context = optimizer.param_dict[0].list_ctx()[0]
        updater.states = {
            index: _together(state, fresh, context) for index, state in structure["kept"].items()
        }
        updater.states_synced = dict.fromkeys(updater.states, True)
        optimizer._index_update_count.clear()
        optimizer._index_update_count.update(structure["counts"])
        optimizer.num_update = structure["num_update"]
        optimizer.lr, optimizer.wd = structure["lr"], structure["wd"]
        optimizer.lr_scheduler = structure["lr_scheduler"]

    @property
    def _optimizer(self) -> Any:
        return self.value.optimizer


def _apart(state: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the optimizer state of one parameter, with its arrays replaced by names of tensors."""
    if isinstance(state, mx.nd.NDArray):
        tensors[name] = view(state)
        return {"tensor": name}
    if isinstance(state, list | tuple):
        parts = [_apart(each, f"{name}.{number}", tensors) for number, each in enumerate(state)]
        return {"list" if isinstance(state, list) else "tuple": parts}
    return {"value": state}


def _together(state: Any, tensors: dict[str, torch.Tensor], context: Any) -> Any:
    (kind, held) = next(iter(state.items()))
    if kind == "tensor":
        tensor = tensors[held]
        dtype = str(tensor.dtype).removeprefix("torch.")
        made = mx.nd.empty(tuple(tensor.shape), ctx=context, dtype=dtype)
        view(made, write=True).copy_(tensor)
        return made
    if kind == "value":
        return held
    parts = [_together(each, tensors, context) for each in held]
    return parts if kind == "list" else tuple(parts)


class MXNetState(HandledState):
    """State of a Gluon block, its trainer, and Python values, as in ``MXNetState(net, trainer, epoch=0, batch=0)``.

    The state commits, restores and broadcasts all parameters, the state of the optimizer, and the values.

    Args:
        net: initialized Gluon block, called once if the shapes of its parameters are inferred from data.
        trainer: a `DistributedTrainer` or a Gluon trainer.
        rng: whether to commit and restore this worker's random generators (torch, numpy, random; not MXNet's).
        **kwargs: values of the state, available as attributes.

    Raises:
        Invalid: a parameter has no value, or a value cannot be copied.
    """

    def __init__(
        self,
        net: mx.gluon.Block,
        trainer: mx.gluon.Trainer | None = None,
        rng: Any = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(net, mx.gluon.Block):
            raise Invalid(f"net is a {type(net).__name__}: pass a Gluon block")
        if trainer is not None and not isinstance(trainer, mx.gluon.Trainer):
            raise Invalid(f"trainer is a {type(trainer).__name__}: pass a Gluon trainer")
        values = {"net": net} if trainer is None else {"net": net, "trainer": trainer}
        super().__init__({**values, **kwargs}, rng)


handler_registry.set_handler_registry(
    [
        (mx.gluon.Block, BlockPart),
        (mx.gluon.Trainer, TrainerPart),
        *handler_registry.get_handler_registry(),
    ]
)
