"""Packed pseudo-gradients: errors, sizes, and error feedback over rounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.diloco.quantization import BLOCK, mean, pack, packed_bytes, unpack, weighted
from elastic.errors import Invalid
from harness.golden import raises

LARGEST = {8: 127, 4: 7}
BITS = pytest.mark.parametrize("bits", [8, 4])


def drawn(seed, elements, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(elements, generator=draw)


def scale_of(values, bits):
    """Scale of each element, computed block by block."""
    scales = torch.empty(len(values), dtype=torch.float64)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].double()
        scales[start : start + BLOCK] = max(
            block.abs().max().item() / LARGEST[bits], torch.finfo(torch.float32).tiny
        )
    return scales


def within_half_a_scale(values, bits):
    errors = (values.double() - unpack(pack(values, bits), len(values), bits).double()).abs()
    return bool((errors <= scale_of(values, bits) / 2 * (1 + 1e-5)).all())


@BITS
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300))
def test_packed_values_when_unpacked_then_each_error_is_at_most_half_the_scale(bits, values):
    assert within_half_a_scale(torch.tensor(values), bits)


@BITS
@given(seed=st.integers(0, 1000), elements=st.integers(1, 1000), power=st.integers(-40, 30))
def test_normal_values_when_unpacked_then_each_error_is_at_most_half_the_scale(
    bits, seed, elements, power
):
    assert within_half_a_scale(drawn(seed, elements, 10.0**power), bits)


@BITS
@given(elements=st.integers(1, 1000))
def test_packed_size_is_the_stated_one(bits, elements):
    packed = pack(drawn(0, elements), bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed.nbytes == packed_bytes(elements, bits)


def test_int4_takes_at_most_27_percent_of_the_bytes_of_bfloat16():
    elements = 100 * BLOCK
    assert packed_bytes(elements, 4) <= 0.27 * 2 * elements
    assert packed_bytes(elements, 8) <= 0.52 * 2 * elements


@BITS
def test_zeros_and_extremes_of_a_block_are_exact(bits):
    values = torch.zeros(3 * BLOCK)
    values[BLOCK], values[BLOCK + 1] = LARGEST[bits], -LARGEST[bits]
    assert torch.equal(unpack(pack(values, bits), len(values), bits), values)


@BITS
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_block_with_a_value_that_is_not_finite_becomes_nan(bits, wrong):
    values = torch.ones(2 * BLOCK)
    values[3] = wrong
    found = unpack(pack(values, bits), len(values), bits)
    assert found[:BLOCK].isnan().all() and found[BLOCK:].isfinite().all()


@BITS
@given(seed=st.integers(0, 1000), rounds=st.integers(1, 30))
def test_error_feedback_over_rounds_sums_to_the_true_value_minus_the_last_error(bits, seed, rounds):
    residual, sent, true = torch.zeros(200), torch.zeros(200).double(), torch.zeros(200).double()
    for number in range(rounds):
        change = drawn(1000 * seed + number, 200)
        wanted = change + residual
        received = unpack(pack(wanted, bits), 200, bits)
        residual = wanted - received
        sent += received.double()
        true += change.double()
    torch.testing.assert_close(sent + residual.double(), true, atol=1e-4, rtol=0.0)


@BITS
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 5), elements=st.integers(1, 400))
def test_mean_is_that_of_the_unpacked_values_of_all_ranks(bits, seed, ranks, elements):
    packed = [pack(drawn(10 * seed + rank, elements), bits) for rank in range(ranks)]
    wanted = torch.stack([unpack(each, elements, bits) for each in packed]).mean(0)
    torch.testing.assert_close(mean(torch.cat(packed), elements, bits, ranks), wanted)


@BITS
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 5), elements=st.integers(1, 400))
def test_weighted_mean_is_that_of_the_unpacked_values_by_weight(bits, seed, ranks, elements):
    packed = [pack(drawn(10 * seed + rank, elements), bits) for rank in range(ranks)]
    weights = torch.arange(ranks, dtype=torch.float64) + seed % 2
    gathered = torch.cat([weighted(*each) for each in zip(packed, weights.tolist(), strict=True)])
    shares = weights / (weights.sum() or 1.0)
    values = torch.stack([unpack(each, elements, bits).double() for each in packed])
    found = mean(gathered, elements, bits, ranks, weighted=True)
    torch.testing.assert_close(found, (shares[:, None] * values).sum(0).float())


@BITS
def test_weights_of_some_ranks_only_are_refused(bits):
    packed = pack(drawn(0, 200), bits)
    gathered = torch.cat([packed, weighted(packed, 2.0)])
    for have in (True, False):
        with raises(Invalid):
            mean(gathered, 200, bits, 2, weighted=have)
