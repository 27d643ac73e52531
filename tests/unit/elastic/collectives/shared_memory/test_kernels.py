"""The reductions in C++, compared bit by bit with numpy and torch, with every available instruction set."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.collectives.dtypes_and_ops import OPS, DType
from elastic.collectives.interface import Op
from elastic.collectives.shared_memory import native_library
from harness.program import stdout_of

LIBRARY = native_library.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native_library.missing())

INTEGERS = {
    DType.UINT8: np.uint8,
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
}
FLOATS = {DType.FLOAT32: np.float32, DType.FLOAT64: np.float64}
HALVES = {DType.FLOAT16: np.uint16, DType.BFLOAT16: np.uint16}  # as bits: numpy has no bfloat16
STORED: dict[DType, Any] = {**INTEGERS, **FLOATS, **HALVES}
SIZES = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 4097]
UNTOUCHED = 0x5A

Bits = np.ndarray[Any, np.dtype[Any]]


def call(kind: str | None, dtype: int, op: int, to: Sequence[int], of: Sequence[int], *rest: Any):
    assert LIBRARY is not None
    name = None if kind is None else kind.encode()
    pointers = [(ctypes.c_void_p * len(each))(*each) for each in (to, of)]
    return LIBRARY.elastic_reduce(
        name, dtype, op, pointers[0], len(to), pointers[1], len(of), *rest
    )


def runs(kind: str) -> bool:
    return LIBRARY is not None and call(kind, DType.UINT8, Op.SUM, [0], [0], 0, 1.0, 1.0) == 0


KINDS = [kind for kind in ("baseline", "neon", "avx2", "avx512") if runs(kind)]


# ---- expected results ------------------------------------------------------------------------------------------------


def least(a: Bits, b: Bits) -> Bits:
    chosen = np.where((a < b) | (a != a), a, b)
    return np.where((a == b) & np.signbit(a), a, chosen)  # -0.0 before 0.0


def greatest(a: Bits, b: Bits) -> Bits:
    chosen = np.where((a > b) | (a != a), a, b)
    return np.where((a == b) & np.signbit(b), a, chosen)


FOLD: dict[Op, Callable[[Bits, Bits], Bits]] = {
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: least,
    Op.MAX: greatest,
}
TORCH = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}


def widened(bits: Bits, dtype: DType) -> Bits:
    half = torch.from_numpy(bits.view(np.int16).copy()).view(TORCH[dtype])
    values: Bits = half.float().numpy()
    return values


def rounded(values: Bits, dtype: DType) -> Bits:
    half = torch.from_numpy(values).to(TORCH[dtype])
    bits: Bits = half.view(torch.int16).numpy().view(np.uint16)
    return bits


Scale = tuple[float, float]  # a factor and a divisor


def expected(dtype: DType, op: Op, sources: list[Bits], scale: Scale) -> Bits:
    with np.errstate(all="ignore"):
        if dtype in HALVES:
            total = functools.reduce(FOLD[op], [widened(each, dtype) for each in sources])
            return rounded(rescaled(total, scale), dtype)
        total = functools.reduce(FOLD[op], sources)
        return rescaled(total, scale) if dtype in FLOATS else total


def rescaled(values: Bits, scale: Scale) -> Bits:
    factor, divisor = (values.dtype.type(each) for each in scale)
    result: Bits = values * factor / divisor
    return result


def same(found: Bits, wanted: Bits, dtype: DType) -> bool:
    """Compare every bit, except for the kind of NaN."""
    if dtype in HALVES:
        nan = np.isnan(widened(wanted, dtype))
        agree = np.array_equal(np.isnan(widened(found, dtype)), nan)
    else:
        nan = wanted != wanted
        agree = np.array_equal(found != found, nan)
    unsigned = np.dtype(f"u{found.itemsize}")
    return agree and np.array_equal(found.view(unsigned)[~nan], wanted.view(unsigned)[~nan])


# ---- calls -----------------------------------------------------------------------------------------------------------


def numbers(dtype: DType, count: int, seed: int) -> Bits:
    """Return all kinds of numbers of a dtype: random bits, and floating point numbers of one magnitude."""
    random = np.random.default_rng(seed)
    stored = np.dtype(STORED[dtype])
    drawn: Bits = np.frombuffer(random.bytes(count * stored.itemsize), stored).copy()
    if dtype in FLOATS:
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 5e-324, np.finfo(stored).max]
        drawn[1::3] = random.standard_normal(count)[1::3]
        drawn[2::7] = random.choice(np.array(special), count)[2::7].astype(stored)
    return drawn


class Place:
    """Elements at an address that is aligned to an element and to nothing more, with untouched bytes around."""

    def __init__(self, content: Bits, shift: int) -> None:
        self._memory = np.full((len(content) + 80) * content.itemsize, UNTOUCHED, np.uint8)
        start = (-self._memory.ctypes.data) % 64 + shift * content.itemsize
        self._begin, self._end = start, start + content.nbytes
        self.content = self._memory[self._begin : self._end].view(content.dtype)
        self.content[:] = content
        self.address = self._memory.ctypes.data + start

    def kept_to_itself(self) -> bool:
        around = [self._memory[: self._begin], self._memory[self._end :]]
        return all((each == UNTOUCHED).all() for each in around)


def check(kind, dtype, op, count, n_sources, scale, overwritten, added, seed=0):
    """Reduce into some of the sources and some other places, and check every byte."""
    inputs = [numbers(dtype, count, seed + 100 * rank) for rank in range(n_sources)]
    sources = [Place(each, shift=(rank * 3 + 1) % 8) for rank, each in enumerate(inputs)]
    more = [Place(np.zeros(count, STORED[dtype]), shift=5) for _ in range(added)]
    destinations = [sources[rank] for rank in overwritten] + more
    to, of = [each.address for each in destinations], [each.address for each in sources]
    assert call(kind, dtype, op, to, of, count, *scale) == 0
    wanted = expected(dtype, op, inputs, scale)
    for place in destinations:
        assert same(place.content, wanted, dtype)
    for rank, place in enumerate(sources):
        assert rank in overwritten or same(place.content, inputs[rank], dtype)
    assert all(place.kept_to_itself() for place in [*sources, *more])


def into(n_sources: int) -> tuple[list[int], int]:
    """In place for an even number of sources, as in a group; otherwise, one source and two other places."""
    return (list(range(n_sources)), 0) if n_sources % 2 == 0 else ([n_sources // 2], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[:-1]), *KINDS[-1:]]
)
def test_every_length_and_number_of_sources_gives_the_bits_of_the_reference(kind):
    for dtype, op, n_sources in itertools.product(DType, sorted(OPS), (1, 2, 3, 4, 5, 8)):
        for count in SIZES:
            check(kind, dtype, op, count, n_sources, (1.0, 1.0), *into(n_sources), seed=count)
        for count in (1, 9, 65, 1000):  # scaled once, and integers not at all
            for scale in ((1 / 3, 1.0), (1.0, 3.0)):
                check(kind, dtype, op, count, n_sources, scale, *into(n_sources), seed=count)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_reductions_into_any_destinations_equal_the_reference(kind, data):
    n_sources = data.draw(st.integers(1, 10))
    overwritten = data.draw(st.lists(st.integers(0, n_sources - 1), unique=True))
    check(
        kind,
        data.draw(st.sampled_from(list(DType))),
        data.draw(st.sampled_from(sorted(OPS))),
        data.draw(st.integers(0, 300)),
        n_sources,
        (
            data.draw(st.sampled_from([1.0, 0.5, 1 / 3, -7.0])),
            data.draw(st.sampled_from([1.0, 2.0, 3.0, 64.0])),
        ),
        overwritten,
        data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(HALVES))
def test_every_half_is_read_and_rounded_as_torch_does(kind, dtype):
    every = np.arange(65536, dtype=np.uint16)
    factors = [(factor, 1.0) for factor in (1.0, 1 / 3, 2.0**-9, 2.0**-20, 3.0, 65536.0)]
    for scale in (*factors, (1.0, 3.0), (1.0, 7.0), (1.0, 1024.0)):
        result = np.zeros_like(every)
        to, of = [result.ctypes.data], [every.ctypes.data]
        assert call(kind, dtype, Op.SUM, to, of, 65536, *scale) == 0
        wanted = expected(dtype, Op.SUM, [every], scale)
        assert same(result, wanted, dtype)
        if scale == (1.0, 1.0):
            nan = np.isnan(widened(every, dtype))
            assert np.array_equal(result[~nan], every[~nan])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divisor", [1.0, 8.0])
def test_sum_of_float16_may_exceed_its_range_before_the_division(kind, divisor):
    sources = [np.full(40, 60_000, np.float16) for _ in range(8)]
    addresses = [each.ctypes.data for each in sources]
    assert call(kind, DType.FLOAT16, Op.SUM, addresses, addresses, 40, 1.0, divisor) == 0
    for each in sources:
        assert (each == (np.inf if divisor == 1.0 else 60_000)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES])
@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
def test_single_nan_makes_the_result_nan(kind, dtype, op):
    for where in range(4):
        values = [np.full(37, float(rank), np.float32) for rank in range(4)]
        values[where][:] = np.nan
        if dtype in HALVES:
            sources = [rounded(each, dtype).copy() for each in values]
        else:
            sources = [each.astype(STORED[dtype]) for each in values]
        addresses = [each.ctypes.data for each in sources]
        assert call(kind, dtype, op, addresses, addresses, 37, 1.0, 1.0) == 0
        for each in sources:
            assert np.isnan(widened(each, dtype) if dtype in HALVES else each).all()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_megabyte_that_is_added_up_elsewhere_has_the_same_bits(kind):
    """Written past the caches, starting at the first aligned register."""
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.INT16, DType.BFLOAT16):
        megabyte = (1 << 20) // np.dtype(STORED[dtype]).itemsize
        for n_sources, more, scale in itertools.product(
            (1, 2, 3, 5), (0, 21), ((1.0, 1.0), (1.0, 3.0))
        ):
            check(kind, dtype, Op.SUM, megabyte + more, n_sources, scale, [], 1, seed=more)
        check(kind, dtype, Op.SUM, megabyte, 2, (1.0, 1.0), [1], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_maximum_number_of_ranks_is_reduced(kind):
    check(
        kind,
        DType.FLOAT32,
        Op.SUM,
        77,
        native_library.MAX_RANKS,
        (1.0, 3.0),
        range(native_library.MAX_RANKS),
        0,
    )


def test_unknown_dtype_operation_and_instruction_set_are_refused():
    for dtype, op in [(-1, Op.SUM), (9, Op.SUM), (DType.INT8, Op.AVERAGE), (DType.INT8, 6)]:
        assert call(None, dtype, op, [0], [0], 1, 1.0, 1.0) == -1
    assert call(None, DType.INT8, Op.SUM, [0], [], 1, 1.0, 1.0) == -1
    assert (
        call(None, DType.INT8, Op.SUM, [0], [0] * (native_library.MAX_RANKS + 1), 1, 1.0, 1.0) == -1
    )
    assert call("abacus", DType.INT8, Op.SUM, [0], [0], 0, 1.0, 1.0) == -2


@pytest.mark.slow
@pytest.mark.parametrize("wished", [*KINDS, "abacus", None])
def test_environment_selects_a_narrower_instruction_set(wished):
    environment = {name: value for name, value in os.environ.items() if name != "ELASTIC_KERNELS"}
    if wished is not None:
        environment["ELASTIC_KERNELS"] = wished
    program = (
        "from elastic.collectives.shared_memory import native_library as library\n"
        "print(library.load().elastic_kernels_name().decode())"
    )
    said = stdout_of(sys.executable, "-c", program, env=environment)
    assert said.split() == [wished if wished in KINDS else KINDS[-1]]
