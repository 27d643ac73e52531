"""Variables of another framework, TensorFlow's, Keras's or MXNet's, as a part of a state: see `part`.

They stay the same ones, and are read and set through numpy. Tensors are named by their place and by the last word of
their path: the numbers that Keras gives to layers depend on what a process has built before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic.api import arrays
from elastic.errors import StateMismatch
from elastic.state.handlers.part import Part


class VariablesPart(Part):
    """The value is a list of variables; or what a subclass finds them in."""

    def variables(self) -> Sequence[Any]:
        return list(self.value)

    def named(self) -> dict[str, Any]:
        """The variables, by the names of their tensors."""
        return {
            f"{number}.{_short(variable)}": variable
            for number, variable in enumerate(self.variables())
        }

    def layout(self) -> list[str]:
        return [
            f"{self.name}.{name} {_dtype(variable)} {list(variable.shape)}"
            for name, variable in self.named().items()
        ]

    def seems_unchanged(self) -> bool:
        return False  # frameworks write into memory without a trace that torch would see

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return None, values_of(self.named())

    def described(self, structure: Any, own: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return dict(tensors)

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        named = self.named()
        for name, tensor in fresh.items():
            if name not in named or list(named[name].shape) != list(tensor.shape):
                raise StateMismatch(
                    f"{self.what}.{name} of shape {list(tensor.shape)} was committed, but does not exist any more:"
                    " commit() after you change a model, or pass the state a new one"
                )
        for name, tensor in fresh.items():
            self.assign(named[name], tensor)

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Sets one of `named`."""
        variable.assign(arrays.to_numpy(value))


def values_of(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Views where there can be any."""
    return {name: arrays.value_of(each) for name, each in named.items()}


def _short(variable: Any) -> str:
    path = str(getattr(variable, "path", None) or variable.name)
    return path.rpartition("/")[2].partition(":")[0]


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))
