"""Pickling of Python objects for other workers of a job, and for commits.

All workers run the same script, so objects defined by the script are pickled by name: a class or enum is resolved to
the receiver's definition, so that ``state.phase is Phase.MAIN`` holds on every worker. Objects without an importable
name (lambdas, classes defined in a function, objects from the launcher's script) are pickled by value, with
cloudpickle.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
from types import FunctionType
from typing import Any

import cloudpickle
import torch

_YOUNGER_THAN_STORAGES = frozenset(  # dtypes that torch can pickle but can't unpickle
    dtype
    for name, dtype in vars(torch).items()
    if name.startswith(("uint16", "uint32", "uint64", "float8", "complex32"))
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that pickles objects by name if possible, and otherwise by value. Raises pickle's exceptions."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, (type, FunctionType)) and _defined_by_the_script(value):
            # Returning NotImplemented makes pickle use its default, which is by name.
            return NotImplemented
        if isinstance(value, torch.Tensor) and value.dtype in _YOUNGER_THAN_STORAGES:
            content = value.detach().cpu().reshape(-1).view(torch.uint8)
            return _viewed, (content, value.dtype, value.shape, value.requires_grad)
        return super().reducer_override(value)


def pickled(value: object) -> bytearray:
    """Pickle an object for other workers. Raises pickle's exceptions."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return bytearray(buffer.getbuffer())


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
