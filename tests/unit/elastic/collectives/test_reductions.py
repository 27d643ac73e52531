"""Reductions of several tensors at once: location of inputs and results."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.collectives.algorithms import reductions
from elastic.collectives.interface import ALONE_BYTES, Op, ReducesInto
from elastic.collectives.single_rank import LocalCollectives


def watched():
    """A group of one rank that reduces, and records its calls."""
    group: Any = LocalCollectives()
    group.allreduce = create_autospec(group.allreduce, side_effect=group.allreduce)
    return group


def reading(group):
    """What it takes to be one that reduces into other memory."""
    into = create_autospec(ReducesInto, instance=True).allreduce_into
    into.side_effect = lambda result, tensor, *rest: group.allreduce(result.copy_(tensor), *rest)
    return into


def read_by(group):
    return [call.args[1].data_ptr() for call in group.allreduce_into.call_args_list]


def sent_by(group):
    return [call.args[0] for call in group.allreduce.call_args_list]


def reduced(tensors, into, op=Op.SUM):
    group = watched()
    works, finish = reductions.allreduce(group, tensors, op, 2.0, 1.0, into)
    for work in works:
        work.wait()
    (sent,) = sent_by(group)
    return sent, finish()


def test_adjacent_tensors_are_reduced_in_place():
    flat = torch.arange(24.0)
    parts = [flat[2:8].view(2, 3), flat[8:9], flat[9:20]]
    sent, results = reduced(parts, parts)
    assert sent.data_ptr() == parts[0].data_ptr() and sent.shape == (18,)
    assert all(result is part for result, part in zip(results, parts, strict=True))
    scaled = torch.arange(24.0)
    scaled[2:20] *= 2
    assert torch.equal(flat, scaled)


@pytest.mark.parametrize(
    "cut",
    [
        lambda flat: [flat[:4], flat[5:9]],  # a gap
        lambda flat: [flat[4:8], flat[:4]],  # in another order
        lambda flat: [flat[0:8:2], flat[8:12]],  # with strides
        lambda flat: [flat[:4], torch.ones(4)],  # of another buffer
    ],
)
def test_other_tensors_are_sent_as_a_copy_and_copied_back(cut):
    flat = torch.arange(12.0)
    parts = cut(flat)
    wanted = [part * 2 for part in parts]
    sent, results = reduced(parts, parts)
    assert sent.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
    for result, part, each in zip(results, parts, wanted, strict=True):
        assert result is part
        assert torch.equal(part, each)


def test_tensors_not_given_as_targets_are_not_overwritten():
    flat = torch.arange(8.0)
    parts = [flat[:4], flat[4:]]
    sent, results = reduced(parts, [parts[0], None])
    assert sent.data_ptr() != flat.data_ptr()
    assert torch.equal(flat, torch.cat([torch.arange(4.0) * 2, torch.arange(4.0, 8.0)]))
    assert torch.equal(results[1], torch.arange(4.0, 8.0) * 2)


def test_large_tensors_are_reduced_in_place_and_small_ones_share_a_buffer():
    large = [torch.ones(ALONE_BYTES // 4), torch.ones(2, ALONE_BYTES // 8)]
    small = [torch.ones(3), torch.ones(4), torch.ones(5, dtype=torch.float64)]
    group = watched()
    tensors = [small[0], large[0], small[1], large[1], small[2]]
    _, finish = reductions.allreduce(group, tensors, Op.SUM, 2.0, 1.0, tensors)
    finish()
    sent = sent_by(group)
    assert [tensor.numel() for tensor in sent] == [7, *(part.numel() for part in large), 5]
    assert [part.data_ptr() for part in large] == [tensor.data_ptr() for tensor in sent[1:3]]
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def test_results_are_reduced_in_their_target_memory():
    flat = torch.full((9,), -1.0)
    tensors, into = [torch.ones(2, 3), torch.arange(3.0)], [flat[:6].view(2, 3), flat[6:]]
    sent, results = reduced(tensors, into)
    assert sent.data_ptr() == flat.data_ptr()
    assert all(result is target for result, target in zip(results, into, strict=True))
    assert flat.tolist() == [2.0] * 6 + [0.0, 2.0, 4.0]
    assert tensors[0].tolist() == [[1.0] * 3] * 2


def test_results_have_separate_targets_or_new_memory():
    tensors = [torch.ones(2), torch.ones(3), torch.ones(4)]
    elsewhere = torch.zeros(3)
    _, results = reduced(tensors, [tensors[0], elsewhere, None])
    assert results[0] is tensors[0]
    assert results[1] is elsewhere
    assert [each.tolist() for each in (*results, *tensors)] == [
        *([2.0] * 2, [2.0] * 3, [2.0] * 4),
        *([2.0] * 2, [1.0] * 3, [1.0] * 4),
    ]


def test_a_mean_of_small_integers_is_widened():
    flat = torch.full((8,), 100, dtype=torch.uint8)
    group = watched()
    parts = [flat[:4], flat[4:]]
    _, finish = reductions.allreduce(group, parts, Op.AVERAGE, 1.0, 1.0, parts)
    finish()
    assert [tensor.dtype for tensor in sent_by(group)] == [torch.int32]
    assert flat.tolist() == [100] * 8


def test_floats_scaled_by_the_group_are_not_scaled_again():
    group, ints = watched(), torch.full((3,), 3, dtype=torch.int32)
    group.scales_inside = True
    floats = torch.ones(4)
    both = [floats, ints]
    _, finish = reductions.allreduce(group, both, Op.SUM, 1.0, 0.5, both)
    assert floats.tolist() == [0.5] * 4  # before the result was requested
    finish()
    assert (floats.tolist(), ints.tolist()) == ([0.5] * 4, [1] * 3)


@pytest.mark.parametrize(
    ("tensor", "op", "prescale", "read"),
    [
        (torch.ones(2, 3), Op.AVERAGE, 1.0, True),
        (torch.ones(3, 2).t(), Op.SUM, 1.0, False),  # not contiguous: it has to be copied
        (torch.ones(1).expand(4), Op.SUM, 1.0, False),  # a sum's gradient: one element in memory
        (torch.arange(8.0)[::2], Op.SUM, 1.0, False),
        (torch.ones(3), Op.SUM, 2.0, False),  # scaled inputs are copies
        (torch.ones(3, dtype=torch.uint8), Op.AVERAGE, 1.0, False),  # its sum needs a wider copy
    ],
)
def test_group_that_reduces_into_other_memory_reads_the_given_tensor(tensor, op, prescale, read):
    group, before = watched(), tensor.clone()
    group.allreduce_into = reading(group)
    _, finish = reductions.allreduce(group, [tensor], op, prescale, 1.0, [None])
    (result,) = finish()
    assert torch.equal(result, before * prescale) and result.dtype == tensor.dtype
    assert (read_by(group) == [tensor.data_ptr()]) is read
    assert torch.equal(tensor, before) and result.data_ptr() != tensor.data_ptr()


def test_group_that_reduces_into_other_memory_writes_the_target():
    group, tensor, wanted = watched(), torch.ones(2, 3), torch.zeros(2, 3)
    group.allreduce_into = reading(group)
    _, finish = reductions.allreduce(group, [tensor], Op.SUM, 1.0, 1.0, [wanted])
    assert finish()[0] is wanted
    assert read_by(group) == [tensor.data_ptr()]
    assert wanted.tolist() == [[1.0] * 3] * 2
    finish = reductions.allreduce(group, [tensor], Op.SUM, 1.0, 1.0, [tensor])[1]
    assert finish()[0] is tensor
    assert len(read_by(group)) == 1  # in place it has nothing to read
