"""Copying of Python values for commits, and pickling for peers.

This module does not access tensors of models or optimizers.

Values that have handlers (models, optimizers, samplers) are referenced, not copied. A value that refers to the model
still does so after a restore, and on another worker refers to that worker's model.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from elastic import pickling
from elastic.errors import Invalid
from elastic.sharding import unsupported_sharding

# immutable types, whose values need not be copied
ATOMS = frozenset({int, float, str, bool, bytes, type(None)})


class Index(dict[Any, Any]):
    """Immutable dictionary. Deep copies share it instead of copying it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Index:
        return self


def copied(value: Any, what: str, referred: Iterable[object] = ()) -> Any:
    """Return a deep copy of ``value``. It shares only the objects in ``referred`` with the original.

    Raises:
        Invalid: the value cannot be copied. The message names ``what``.
    """
    if type(value) in ATOMS:
        return value
    memo: dict[int, Any] = {id(each): each for each in referred}
    given = len(memo)
    try:
        made = _copied(value, memo)
    except Exception as error:
        raise Invalid(
            f"{what} can't be copied for a commit ({type(error).__name__}: {error}): remove it from the state,"
            " or store the values from which it is created"
        ) from error
    unsupported_sharding.check_within(what, itertools.islice(memo.values(), given, None))
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy. Faster than ``copy.deepcopy`` for dictionaries and lists of numbers and strings."""
    kind = type(value)
    if kind in ATOMS or kind is Index or (kind is tuple and ATOMS.issuperset(map(type, value))):
        return value
    if (kind is not dict and kind is not list) or id(value) in memo:
        return copy.deepcopy(value, memo)
    made: Any
    if kind is dict:
        made = memo[id(value)] = {}
        for key, each in value.items():
            made[_copied(key, memo)] = each if type(each) in ATOMS else _copied(each, memo)
    else:
        made = memo[id(value)] = []
        made += [each if type(each) in ATOMS else _copied(each, memo) for each in value]
    return made


class _Pickler(pickling.Pickler):
    def __init__(self, file: io.BytesIO, referred: dict[str, object]) -> None:
        super().__init__(file)
        self._names = {id(value): name for name, value in referred.items()}

    def persistent_id(self, value: object) -> str | None:
        return self._names.get(id(value))

    def reducer_override(self, value: object) -> Any:
        # Load a CUDA tensor to the receiver's own GPU. By default it would be loaded to the sender's device index,
        # which may be another worker's GPU.
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return _to_this_gpu, (value.detach().cpu(), value.requires_grad)
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, referred: dict[str, object]) -> None:
        super().__init__(file)
        self._referred = referred

    def persistent_load(self, name: str) -> object:
        return self._referred[name]


def _to_this_gpu(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.cuda().requires_grad_(requires_grad)


def dumps(value: Any, what: str, referred: dict[str, object]) -> bytes:
    """Pickle a value for a worker of the same job.

    Raises:
        Invalid: the value cannot be pickled. The message names ``what``.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, referred).dump(value)
    except Exception as error:
        raise Invalid(
            f"{what} can't be pickled for joining workers ({type(error).__name__}: {error}): remove it from the"
            " state"
        ) from error
    return file.getvalue()


def loads(blob: bytes, referred: dict[str, object]) -> Any:
    """Unpickle the result of `dumps`. Use only for bytes from an authenticated worker of the same job."""
    return _Unpickler(io.BytesIO(blob), referred).load()
