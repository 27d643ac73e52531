"""Conversion of a commit's Python values to plain data: extends `plain_data` with torch and numpy types.

Values that are not plain data are pickled, and only these are unpickled.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy
import torch

from elastic.checkpoints.plain_data import CorruptedData, NotPlain, decode, encode, tagged
from elastic.state.handlers.model_state import Opaque
from elastic.state.handlers.python_values import Index
from elastic.state.snapshots.snapshot import as_bytes
from elastic.state.snapshots.state_structure import plain

INLINE = 1 << 16  # maximum size in bytes of a tensor in a plain value


def to_plain(value: Any) -> Any:
    """Convert a value to types that ``json.dumps`` can write.

    Raises:
        NotPlain: the value has an unsupported type.
    """
    try:
        return encode(value, _other)
    except RecursionError:
        raise NotPlain(
            "the value contains a reference to itself, which plain data can't express: store it with"
            " pickle"
        ) from None


def from_plain(text: Any) -> Any:
    """Convert the result of `to_plain` back to the value.

    Raises:
        CorruptedData: the input was not produced by `to_plain`.
    """
    return decode(text, _back)


def _other(value: Any) -> Any:
    kind = type(value)
    if kind is Index:
        return tagged("Index", [[encode(k, _other), encode(v, _other)] for k, v in value.items()])
    if kind is torch.Tensor and plain(value) and not value.is_meta:
        if value.nbytes > INLINE or value.requires_grad:
            raise NotPlain(
                f"the tensor has {value.nbytes} bytes, but plain data has at most {INLINE} per tensor:"
                " store it separately"
            )
        content = as_bytes(value.cpu()).numpy().tobytes()
        return tagged("tensor", [_dtype(value.dtype), list(value.shape), _text(content)])
    if kind is numpy.ndarray and not value.dtype.hasobject and value.nbytes <= INLINE:
        return tagged("ndarray", [value.dtype.str, list(value.shape), _text(value.tobytes())])
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return tagged("scalar", [value.dtype.str, _text(value.tobytes())])
    if kind is Opaque and not value.tensors:
        return tagged("Opaque", None)
    if kind is torch.dtype:
        return tagged("dtype", _dtype(value))
    if kind is torch.Size:
        return tagged("Size", list(value))
    if kind is torch.device:
        return tagged("device", str(value))
    raise NotPlain(
        f"a {kind.__module__}.{kind.__qualname__} is not plain data: store it with pickle"
    )


def _back(kind: str, content: Any) -> Any:
    made = _KINDS.get(kind)
    if made is None:
        raise CorruptedData(
            f"the data contains a value of the unknown kind {kind!r}, which this version does not"
            " write"
        )
    return made(content)


def _index(content: Any) -> Index:
    return Index({decode(key, _back): decode(each, _back) for key, each in content})


def _tensor(content: Any) -> torch.Tensor:
    dtype, shape, text = content
    raw = bytearray(base64.b64decode(text, validate=True))
    if not raw:
        return torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype_named(dtype)).reshape(shape).clone()


def _array(content: Any) -> numpy.ndarray[Any, Any]:
    dtype, shape, text = content
    raw = base64.b64decode(text, validate=True)
    flat: numpy.ndarray[Any, Any] = numpy.frombuffer(raw, dtype=numpy.dtype(dtype))
    return numpy.array(flat.reshape(shape))


def _scalar(content: Any) -> Any:
    dtype, text = content
    return numpy.frombuffer(base64.b64decode(text, validate=True), dtype=numpy.dtype(dtype))[0]


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as ``float32``.

    Raises:
        CorruptedData: this version of torch has no such dtype.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CorruptedData(f"this version of torch has no dtype {name!r}")
    return found


_KINDS: dict[str, Callable[[Any], Any]] = {
    "Index": _index,
    "tensor": _tensor,
    "ndarray": _array,
    "scalar": _scalar,
    "dtype": dtype_named,
    "Size": torch.Size,
    "device": torch.device,
    "Opaque": lambda content: Opaque({}),
}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
