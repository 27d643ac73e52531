"""Reported values: plain values are unchanged, numbers of any kind are numbers, anything else is named."""

from __future__ import annotations

import collections
import enum
import math
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import Invalid
from elastic.protocol import messages
from elastic.protocol.messages import REPORT_LIMIT, Worker, encoded
from elastic.protocol.report_values import Report, packed, unpacked
from harness.golden import raises, recorded

A = Worker("h", 1, 2)


def come_out(metrics):
    """Over the wire."""
    said = messages.Reported(1, 1, 3, 1, 4, 1.8e9, packed(metrics))
    report = unpacked(A, messages.from_worker.decode(encoded(said)))
    assert report == Report(1, 4, 3, "h:1#2", report.metrics, 1.8e9)
    return report.metrics


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=5))
def test_plain_values_are_unchanged(metrics):
    assert come_out(metrics) == metrics


class Colour(enum.IntEnum):
    RED = 3


class Kind(str, enum.Enum):
    TRAIN = "train"


class Text(str):
    """A class of the script."""


@pytest.mark.parametrize(
    ("given_", "comes_out"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.array([[2.5]]), 2.5),
        (np.array(7), 7),
        (np.str_("a"), "a"),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[3]]), 3),
        (torch.tensor(True), True),
        (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
        (torch.nn.Parameter(torch.ones(1)), 1.0),
        (Colour.RED, 3),
        (Kind.TRAIN, "train"),
        (Text("é"), "é"),
        ((1, (2,)), [1, [2]]),
        (collections.OrderedDict(b=1), {"b": 1}),
        (MappingProxyType({"c": np.float16(1)}), {"c": 1.0}),
        ([torch.tensor(1), {"x": np.float64(2)}], [1, {"x": 2.0}]),
        ("\ud800 is not text", "? is not text"),
    ],
    # Python 3.12 changed the repr of an OrderedDict.
    ids=lambda value: (
        f"{type(value).__name__} {dict(value) if isinstance(value, dict) else value!r}"[:30]
    ),
)
def test_values_similar_to_plain_ones_are_converted(given_, comes_out):
    [value] = come_out({"x": given_}).values()
    assert type(value) is type(comes_out)
    recorded("messages", value)


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e300, torch.tensor(math.inf)])
def test_infinities_are_numbers_here(number):
    assert come_out({"x": number}) == {"x": float(number)}


def test_nan_is_a_number_here():
    for nan in (math.nan, np.float32("nan"), torch.tensor(math.nan)):
        assert math.isnan(come_out({"x": nan})["x"])


def looped() -> list:
    loop: list = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("metrics", "kind"),
    [
        (0.5, TypeError),
        ([("loss", 1)], TypeError),
        ({1: 2}, TypeError),
        ({"a": {None: 2}}, TypeError),
        ({"a": b"x"}, TypeError),
        ({"a": [1, {"b": {1, 2}}]}, TypeError),
        ({"a": Path("x")}, TypeError),
        ({"a": 1j}, TypeError),
        ({"a": torch.Tensor}, TypeError),
        ({"a": torch.ones(3)}, TypeError),
        ({"a": np.zeros((2, 2))}, TypeError),
        ({"a": np.zeros(0)}, TypeError),
        ({"a": np.datetime64("2026-01-01")}, TypeError),
        ({"a": torch.tensor(1j)}, TypeError),
        ({"a": 2**64}, Invalid),
        ({"a": [-(2**63) - 1]}, Invalid),
        ({"a": looped()}, Invalid),
        ({"a": "x" * REPORT_LIMIT}, Invalid),
    ],
)
def test_values_that_cannot_be_reported_are_refused(metrics, kind):
    with raises(kind):
        packed(metrics)


def test_report_limit_is_in_bytes_and_fits_the_message():
    body = packed({"a": "x" * (REPORT_LIMIT - 8)})
    assert REPORT_LIMIT - 8 < len(body) <= REPORT_LIMIT
    come_out({"a": "x" * (REPORT_LIMIT - 8)})
    with raises(ValueError):
        packed({"a": "é" * (REPORT_LIMIT // 2)})
    long = encoded(messages.Reported(1, 1, 1, 0, 1, 0.0, bytes(REPORT_LIMIT + 1)))
    with pytest.raises(msgspec.ValidationError, match="length <= 65536"):
        messages.from_worker.decode(long)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91\x01",  # a list
        b"\x81\x01\x01",  # a key that is a number
        b"\x81\xa1a\xa1\xff",  # no UTF-8
        b"\x81\xa1a\xc4\x01x",  # bytes
        b"\x81\xa1a\xd4\x05x",  # an extension
        b"\x81\xa1a" + b"\x91" * 5000 + b"\x01",
        msgspec.msgpack.encode({"a": [[[{"b": b"x"}]]]}),
    ],
)
def test_unexpected_report_data_is_refused(body):
    with pytest.raises(ValueError):
        unpacked(A, messages.Reported(1, 1, 3, 1, 4, 1.8e9, body))
