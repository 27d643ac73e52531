"""Handler for TensorFlow, Keras and MXNet variables (see `part`).

The handler keeps references to the variables and accesses their values as numpy arrays. The name of a tensor consists
of its index and the last component of its path, because the numbers in Keras's layer names depend on the layers that
the process has built earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic.api import arrays
from elastic.errors import StateMismatch
from elastic.state.handlers.part import Part

# possible names of the variable in which a Keras optimizer counts its steps
COUNTS = ("iteration", "iterations", "iter")


class VariablesPart(Part):
    """Handler of a list of variables. A subclass may find the variables in another object, such as a model."""

    # name of the optimizer's step counter; "" before the search, None if not found
    _count: str | None = ""

    def variables(self) -> Sequence[Any]:
        return list(self.value)

    def named(self) -> dict[str, Any]:
        """Return the variables, keyed by tensor name."""
        return {
            f"{number}.{_short(variable)}": variable
            for number, variable in enumerate(self.variables())
        }

    def steps_taken(self) -> int | None:
        """Return the value of the optimizer's step counter in the last commit, or None without a counter."""
        committed = self.committed()
        if self._count == "" and committed:
            self._count = next(filter(_is_count, committed), None)
        count = committed.get(self._count) if self._count else None
        return int(count) if count is not None and count.numel() == 1 else None

    def layout(self) -> list[str]:
        return [
            f"{self.name}.{name} {_dtype(variable)} {list(variable.shape)}"
            for name, variable in self.named().items()
        ]

    def seems_unchanged(self) -> bool:
        return False  # torch does not detect writes by other frameworks

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
                    f"the commit contains {self.what}.{name} of shape {list(tensor.shape)}, but the model no"
                    " longer has this variable: call commit() after you change a model, or pass a new model to"
                    " the state"
                )
        for name, tensor in fresh.items():
            self.assign(named[name], tensor)

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Assign a value to one of the variables returned by `named`."""
        variable.assign(arrays.to_numpy(value))


def values_of(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the variables' values as torch tensors, which share the variables' memory where possible."""
    return {name: arrays.value_of(each) for name, each in named.items()}


def _is_count(name: str) -> bool:
    return name.partition(".")[2] in COUNTS


def _short(variable: Any) -> str:
    path = str(getattr(variable, "path", None) or variable.name)
    return path.rpartition("/")[2].partition(":")[0]


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))
