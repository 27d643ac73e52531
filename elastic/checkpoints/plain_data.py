"""Lossless conversion of Python values to JSON and back, without pickle. Pure: no I/O, no clock.

Values without a JSON equivalent become objects with the key ``~``: ``{"~": "tuple", "v": [1, 2]}``. Values of any other
type raise NotPlain. Decoding a file never executes code from it.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

Encode = Callable[[Any], Any]


class NotPlain(ValueError):
    """Error raised for a value of a type that only pickle can store."""


class CorruptedData(ValueError):
    """Error raised for input that `encode` did not produce."""


def _refuse(value: Any) -> Any:
    raise NotPlain(
        f"a {type(value).__module__}.{type(value).__qualname__} is not plain data: store it with pickle"
    )


def encode(value: Any, other: Encode = _refuse) -> Any:
    """Convert a value to types that ``json.dumps`` can write.

    Args:
        value: the value.
        other: called for each value of another type. Returns an object from `tagged`, or raises NotPlain.

    Raises:
        NotPlain: a value has an unsupported type.
        RecursionError: the value contains itself.
    """
    kind = type(value)
    if kind in (int, str, bool, type(None)):
        return value
    if kind is float:
        return value if math.isfinite(value) else tagged("float", repr(value))
    if kind is list:
        return [encode(each, other) for each in value]
    if kind is tuple:
        return tagged("tuple", [encode(each, other) for each in value])
    if kind is dict:
        if "~" not in value and all(type(key) is str for key in value):
            return {key: encode(each, other) for key, each in value.items()}
        return tagged("dict", _pairs(value, other))
    if kind is OrderedDict or kind is Counter:
        return tagged(kind.__name__, _pairs(value, other))
    if kind is set or kind is frozenset:
        return tagged(kind.__name__, [encode(each, other) for each in value])
    if kind is bytes:
        return tagged("bytes", base64.b64encode(value).decode())
    return other(value)


def tagged(kind: str, content: Any) -> dict[str, Any]:
    """Return the JSON object for a value of the type ``kind`` with the given content."""
    return {"~": kind, "v": content}


def _pairs(value: dict[Any, Any], other: Encode) -> list[Any]:
    return [[encode(key, other), encode(each, other)] for key, each in value.items()]


def _mapping(of: type) -> Callable[[Any, Callable[[Any], Any]], Any]:
    def made(content: Any, back: Callable[[Any], Any]) -> Any:
        value = of()
        for key, each in content:
            value[back(key)] = back(each)
        return value

    return made


_KINDS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "tuple": lambda content, back: tuple(map(back, content)),
    "dict": _mapping(dict),
    "OrderedDict": _mapping(OrderedDict),
    "Counter": _mapping(Counter),
    "set": lambda content, back: set(map(back, content)),
    "frozenset": lambda content, back: frozenset(map(back, content)),
    "bytes": lambda content, back: base64.b64decode(content, validate=True),
    "float": lambda content, back: float(content),
}


def _unknown(kind: str, content: Any) -> Any:
    raise CorruptedData(
        f"the data contains a value of the unknown kind {kind!r}, which this version does not write"
    )


def decode(text: Any, other: Callable[[str, Any], Any] = _unknown) -> Any:
    """Convert the result of ``json.loads`` back to the value that was passed to `encode`.

    Args:
        text: the result of ``json.loads``.
        other: function that converts back the objects that the function ``other`` of `encode` created. Called with the
            type and the content of each.

    Raises:
        CorruptedData: the input was not produced by `encode`.
    """

    def back(each: Any) -> Any:
        return decode(each, other)

    if isinstance(text, list):
        return [back(each) for each in text]
    if not isinstance(text, dict):
        return text
    if "~" not in text:
        return {key: back(each) for key, each in text.items()}
    kind, content = text["~"], text.get("v")
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    try:
        return other(str(kind), content) if made is None else made(content, back)
    except CorruptedData:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptedData(f"a value of kind {kind!r} has invalid content: {error}") from error
