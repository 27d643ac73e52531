"""Pickles Python objects for the other workers of a job, and for its own commits.

All workers run one script, so what the script defines is sent by its name, as pickle does: a class or an enum stays the
one that the receiver has, and ``state.phase is Phase.MAIN`` holds everywhere. What no name leads to (a lambda, a class
made in a function, whatever came from the launcher's own script) is sent whole, as cloudpickle does.
"""

from __future__ import annotations

import operator
import pickle
import sys
from types import FunctionType
from typing import Any

import cloudpickle
import torch

_YOUNGER_THAN_STORAGES = (
    frozenset(  # dtypes that torch's own pickles can be written with, and not be read
        dtype
        for name, dtype in vars(torch).items()
        if name.startswith(("uint16", "uint32", "uint64", "float8", "complex32"))
    )
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Raises what pickle raises."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, (type, FunctionType)) and _defined_by_the_script(value):
            return NotImplemented  # by its name
        if isinstance(value, torch.Tensor) and value.dtype in _YOUNGER_THAN_STORAGES:
            content = value.detach().cpu().reshape(-1).view(torch.uint8)
            return _viewed, (content, value.dtype, value.shape, value.requires_grad)
        return super().reducer_override(value)


def _defined_by_the_script(value: type | FunctionType) -> bool:
    if value.__module__ != "__main__":
        return False
    try:
        return operator.attrgetter(value.__qualname__)(sys.modules["__main__"]) is value
    except AttributeError:
        return False


def _viewed(
    content: torch.Tensor, dtype: torch.dtype, shape: torch.Size, requires_grad: bool
) -> torch.Tensor:
    return content.view(dtype).reshape(shape).requires_grad_(requires_grad)
