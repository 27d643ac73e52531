"""Keras models and optimizers as parts of a state: see `elastic.state.handlers.part`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.api import arrays
from elastic.api.keras_version import keras
from elastic.errors import Invalid
from elastic.keras import keras3_optimizer as reducing
from elastic.keras import trace_before_first_step
from elastic.state import handler_registry
from elastic.state.handlers.framework_variables import VariablesPart, values_of
from elastic.state.snapshots.snapshot import same_bits


class ModelPart(VariablesPart):
    """A built Keras model, as a part of a state."""

    value: keras.Model

    def _adopt_value(self) -> None:
        if not self.value.built:
            raise Invalid(
                f"{self.what} has no weights yet: add an Input, or call the model once, before you pass it to a"
                " state"
            )
        trace_before_first_step.watch(self.value)

    def build_step(self, step_input: bytes) -> None:
        trace_before_first_step.prepare(self.value, step_input)

    def variables(self) -> Sequence[Any]:
        _settle(self.value)
        return list(self.value.weights)

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        trained = {id(each) for each in self.value.trainable_weights}
        named = self.named()
        names = [name for name, each in named.items() if id(each) in trained]
        return {"trained": names}, values_of(named)

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        _forget(self.value)
        super().place(structure, fresh, own, restoring=restoring)

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        return set(structure["trained"])

    def digested(self) -> dict[str, torch.Tensor]:
        return self._committed(True)

    def digested_buffers(self) -> dict[str, torch.Tensor]:
        return self._committed(False)

    def _committed(self, trained: bool) -> dict[str, torch.Tensor]:
        bank = self.snapshot.bank
        names = set(bank.extra[0]["trained"])
        return {
            name: tensor for name, tensor in bank.buffers().items() if (name in names) == trained
        }

    def differing(self) -> list[str]:
        live = self.named()
        return [
            f"{self.name}.{name}"
            for name, buffer in self.digested().items()
            if name in live and not same_bits(arrays.value_of(live[name]), buffer)
        ]


class OptimizerPart(VariablesPart):
    """A Keras optimizer together with the variables of its model, as a part of a state. See `build`."""

    value: keras.optimizers.Optimizer

    def _adopt_value(self) -> None:
        if not reducing.is_built(self.value):
            raise Invalid(
                f"{self.what} has not been built: also pass the model to the state, or call"
                " optimizer.build(model.trainable_variables)"
            )

    def variables(self) -> Sequence[Any]:
        return reducing.variables_of(self.value)

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        # Accumulated gradients of a distributed optimizer differ between workers.
        own = {id(each) for each in reducing.accumulated(self.value)}
        named = self.named()
        return {"own": [name for name, each in named.items() if id(each) in own]}, values_of(named)

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        return set(self.committed()) - set(structure["own"]) if structure["own"] else None


def _settle(model: Any) -> None:
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def _forget(model: Any) -> None:
    if hasattr(model, "_jax_state"):
        model._jax_state = None
        model._jax_state_synced = True


handler_registry.set_handler_registry(
    [
        (keras.Model, ModelPart),
        *((kind, OptimizerPart) for kind in reducing.kinds()),
        *handler_registry.get_handler_registry(),
    ]
)
