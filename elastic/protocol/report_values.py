"""Values that `report` accepts, and their encoding. Pure: no I/O, no clock.

`report` accepts numbers, strings, None, and lists and dicts of these: the types of JSON, plus NaN and infinity. Sender
and receiver both validate values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from elastic.errors import Invalid
from elastic.protocol.messages import REPORT_LIMIT, Reported, Worker

DEPTH = 32  # maximum nesting of lists and dicts
INTEGERS = range(-(2**63), 2**64)

Path = tuple[str | int, ...]
Metrics = dict[str, Any]

_decoder: msgspec.msgpack.Decoder[Metrics] = msgspec.msgpack.Decoder(Metrics)


@dataclass(frozen=True)
class Report:
    """One ``elastic.report`` call of a worker, as received by the process that started the job."""

    rank: int  # rank at the time of the report, like size and generation below
    size: int
    generation: int
    worker: str  # name of the worker, in the form host:slot#start
    metrics: Metrics
    at: float  # time of the report in seconds since 1970, on the worker's clock


def packed(metrics: Mapping[str, Any]) -> bytes:
    """Validate and encode metrics.

    Raises:
        TypeError: a value has an unsupported type. The message names its key.
        Invalid: the encoded metrics are too large.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"report() got a {_name(metrics)}: pass a dict, as in report({{'loss': 0.1}})"
        )
    body = msgspec.msgpack.encode(_dict(metrics, ()))
    if len(body) > REPORT_LIMIT:
        raise Invalid(
            f"report() got {len(body)} bytes, but the limit is {REPORT_LIMIT}: report numbers, and save large"
            " values to a file"
        )
    return body


def unpacked(worker: Worker, reported: Reported) -> Report:
    """Validate and decode a report.

    Raises ValueError if the report is invalid, because any process with the job's secret can send one.
    """
    try:
        metrics = _dict(_decoder.decode(reported.metrics), ())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ValueError(
            f"metrics is not a dict of names and values ({error}): pass a dict such as {{'loss': 0.1}}"
        ) from error
    return Report(
        reported.rank, reported.size, reported.generation, str(worker), metrics, reported.at
    )


def _dict(values: Mapping[Any, Any], path: Path) -> Metrics:
    for key in values:
        if not isinstance(key, str):
            raise TypeError(
                f"report(): {_where(path)} has the key {key!r}, a {_name(key)}: use strings as keys"
            )
    return {_text(key): _plain(value, (*path, key)) for key, value in values.items()}


def _plain(value: Any, path: Path) -> Any:
    # Compare exact types: msgspec does not support numpy.float64, which is a subclass of float.
    if isinstance(value, float):
        return float.__float__(value)
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        if number not in INTEGERS:
            raise Invalid(
                f"report(): {_where(path)} is an integer that exceeds 64 bits: pass a float or a string"
            )
        return number
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping | list | tuple):
        if len(path) > DEPTH:
            raise Invalid(
                f"report(): {_where(path[:4])}... is nested more than {DEPTH} levels deep: flatten the values"
            )
        if isinstance(value, Mapping):
            return _dict(value, path)
        return [_plain(each, (*path, index)) for index, each in enumerate(value)]
    return _plain(_only(value, path), path)


def _only(value: Any, path: Path) -> Any:
    count = _count(value)
    if count is None:
        raise TypeError(
            f"report(): {_where(path)} is a {_name(value)}: pass None, numbers, strings, and lists and dicts of them"
        )
    if count != 1:
        raise TypeError(
            f"report(): {_where(path)} is a {_name(value)} of {count} elements: pass one number, such as"
            " its mean, or a list"
        )
    found = value.item()
    if found is not None and not isinstance(found, float | int | str):
        raise TypeError(
            f"report(): {_where(path)} is a {_name(value)} of a {_name(found)}: pass numbers"
        )
    return found


def _count(value: Any) -> int | None:
    if isinstance(value, type) or not callable(getattr(value, "item", None)):
        return None
    numel = getattr(value, "numel", None)  # torch tensors have this method
    # numpy arrays have this attribute
    count = numel() if callable(numel) else getattr(value, "size", None)
    return count if isinstance(count, int) else None


def _text(value: str) -> str:
    if value.isascii():
        return str.__str__(value)
    return value.encode(errors="replace").decode()


def _where(path: Path) -> str:
    return "metrics" + "".join(f"[{_text(k)!r}]" if isinstance(k, str) else f"[{k}]" for k in path)


def _name(value: Any) -> str:
    return type(value).__name__
