"""Packed pseudo-gradients: errors, sizes, and error feedback over rounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.diloco.quantization import BLOCK, FORMATS, mean, pack, packed_bytes, unpack, weighted
from elastic.errors import Invalid
from harness.golden import raises

CODES = pytest.mark.parametrize("code", FORMATS.values(), ids=map(str, FORMATS))


def drawn(seed, elements, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(elements, generator=draw)


def scale_of(values, code):
    """Scale of each element, computed block by block."""
    scales = torch.empty(len(values), dtype=torch.float64)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].double()
        scales[start : start + BLOCK] = max(
            block.abs().max().item() / code.largest, torch.finfo(torch.float32).tiny
        )
    return scales


def within_the_stated_error(values, code):
    errors = (values.double() - unpack(pack(values, code), len(values), code).double()).abs()
    largest = scale_of(values, code) / 2
    if code.dtype.is_floating_point:
        largest = torch.maximum(values.double().abs() / 16, scale_of(values, code) / 1024)
    return bool((errors <= largest * (1 + 1e-5)).all())


@CODES
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300))
def test_packed_values_when_unpacked_then_each_error_is_within_the_limit(code, values):
    assert within_the_stated_error(torch.tensor(values), code)


@CODES
@given(seed=st.integers(0, 1000), elements=st.integers(1, 1000), power=st.integers(-40, 30))
def test_normal_values_when_unpacked_then_each_error_is_within_the_limit(
    code, seed, elements, power
):
    assert within_the_stated_error(drawn(seed, elements, 10.0**power), code)


@CODES
@given(elements=st.integers(1, 1000))
def test_packed_size_matches_packed_bytes(code, elements):
    packed = pack(drawn(0, elements), code)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed.nbytes == packed_bytes(elements, code)


def test_int4_takes_at_most_27_percent_of_the_bytes_of_bfloat16():
    elements = 100 * BLOCK
    assert packed_bytes(elements, FORMATS["int4"]) <= 0.27 * 2 * elements
    assert packed_bytes(elements, FORMATS[torch.int8]) <= 0.52 * 2 * elements


@CODES
def test_zeros_and_extremes_of_a_block_are_exact(code):
    values = torch.zeros(3 * BLOCK)
    values[BLOCK], values[BLOCK + 1] = code.largest, -code.largest
    assert torch.equal(unpack(pack(values, code), len(values), code), values)


@CODES
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_block_with_a_value_that_is_not_finite_becomes_nan(code, wrong):
    values = torch.ones(2 * BLOCK)
    values[3] = wrong
    found = unpack(pack(values, code), len(values), code)
    assert found[:BLOCK].isnan().all() and found[BLOCK:].isfinite().all()


@CODES
@given(seed=st.integers(0, 1000), rounds=st.integers(1, 30))
def test_error_feedback_over_rounds_sums_to_the_true_value_minus_the_last_error(code, seed, rounds):
    residual, sent, true = torch.zeros(200), torch.zeros(200).double(), torch.zeros(200).double()
    for number in range(rounds):
        change = drawn(1000 * seed + number, 200)
        wanted = change + residual
        received = unpack(pack(wanted, code), 200, code)
        residual = wanted - received
        sent += received.double()
        true += change.double()
    torch.testing.assert_close(sent + residual.double(), true, atol=1e-4, rtol=0.0)


@CODES
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 5), elements=st.integers(1, 400))
def test_mean_equals_the_mean_of_the_unpacked_values_of_all_ranks(code, seed, ranks, elements):
    packed = [pack(drawn(10 * seed + rank, elements), code) for rank in range(ranks)]
    wanted = torch.stack([unpack(each, elements, code) for each in packed]).mean(0)
    torch.testing.assert_close(mean(torch.cat(packed), elements, code, ranks), wanted)


@CODES
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 5), elements=st.integers(1, 400))
def test_weighted_mean_is_that_of_the_unpacked_values_by_weight(code, seed, ranks, elements):
    packed = [pack(drawn(10 * seed + rank, elements), code) for rank in range(ranks)]
    weights = torch.arange(ranks, dtype=torch.float64) + seed % 2
    gathered = torch.cat([weighted(*each) for each in zip(packed, weights.tolist(), strict=True)])
    shares = weights / (weights.sum() or 1.0)
    values = torch.stack([unpack(each, elements, code).double() for each in packed])
    found = mean(gathered, elements, code, ranks, weighted=True)
    torch.testing.assert_close(found, (shares[:, None] * values).sum(0).float())


@CODES
def test_weights_of_some_ranks_only_are_refused(code):
    packed = pack(drawn(0, 200), code)
    gathered = torch.cat([packed, weighted(packed, 2.0)])
    for have in (True, False):
        with raises(Invalid):
            mean(gathered, 200, code, 2, weighted=have)
