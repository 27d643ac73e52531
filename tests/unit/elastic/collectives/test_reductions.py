"""Reductions of several tensors at once: where they lie, and where their results do."""

from __future__ import annotations

import pytest
import torch

from elastic.collectives.algorithms import reductions
from elastic.collectives.interface import ALONE_BYTES, Op
from elastic.collectives.local import LocalCollectives


class Seen(LocalCollectives):
    """Of one rank; keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def allreduce(self, tensor, op, scale=1.0):
        self.tensor = tensor
        self.sent.append(tensor)
        return super().allreduce(tensor, op, scale)


def reduced(tensors, in_place, op=Op.SUM):
    group = Seen()
    works, finish = reductions.allreduce(group, tensors, op, 2.0, 1.0, in_place)
    for work in works:
        work.wait()
    return group.tensor, finish()


def test_tensors_one_after_the_other_are_reduced_where_they_are():
    flat = torch.arange(24.0)
    parts = [flat[2:8].view(2, 3), flat[8:9], flat[9:20]]
    sent, results = reduced(parts, [True] * 3)
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
def test_others_travel_as_a_copy_and_come_back(cut):
    flat = torch.arange(12.0)
    parts = cut(flat)
    wanted = [part * 2 for part in parts]
    sent, results = reduced(parts, [True] * 2)
    assert sent.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
    for result, part, each in zip(results, parts, wanted, strict=True):
        assert result is part
        assert torch.equal(part, each)


def test_what_is_not_to_be_overwritten_stays():
    flat = torch.arange(8.0)
    sent, results = reduced([flat[:4], flat[4:]], [True, False])
    assert sent.data_ptr() != flat.data_ptr()
    assert torch.equal(flat, torch.cat([torch.arange(4.0) * 2, torch.arange(4.0, 8.0)]))
    assert torch.equal(results[1], torch.arange(4.0, 8.0) * 2)


def test_large_tensors_are_reduced_where_they_are_and_small_ones_share_a_buffer():
    large = [torch.ones(ALONE_BYTES // 4), torch.ones(2, ALONE_BYTES // 8)]
    small = [torch.ones(3), torch.ones(4), torch.ones(5, dtype=torch.float64)]
    group = Seen()
    tensors = [small[0], large[0], small[1], large[1], small[2]]
    _, finish = reductions.allreduce(group, tensors, Op.SUM, 2.0, 1.0, [True] * 5)
    finish()
    assert [tensor.numel() for tensor in group.sent] == [7, *(part.numel() for part in large), 5]
    assert [part.data_ptr() for part in large] == [tensor.data_ptr() for tensor in group.sent[1:3]]
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def test_a_mean_of_small_integers_is_widened():
    flat = torch.full((8,), 100, dtype=torch.uint8)
    group = Seen()
    _, finish = reductions.allreduce(group, [flat[:4], flat[4:]], Op.AVERAGE, 1.0, 1.0, [True] * 2)
    finish()
    assert group.tensor.dtype == torch.int32
    assert flat.tolist() == [100] * 8


def test_a_group_that_scales_inside_scales_floats_and_nothing_is_scaled_again():
    class Scaling(Seen):
        scales_inside = True

    group, ints = Scaling(), torch.full((3,), 3, dtype=torch.int32)
    floats = torch.ones(4)
    _, finish = reductions.allreduce(group, [floats, ints], Op.SUM, 1.0, 0.5, [True] * 2)
    assert floats.tolist() == [0.5] * 4  # before anybody has asked for the result
    finish()
    assert (floats.tolist(), ints.tolist()) == ([0.5] * 4, [1] * 3)


@pytest.mark.parametrize(
    ("tensor", "op", "prescale", "read"),
    [
        (torch.ones(2, 3), Op.AVERAGE, 1.0, True),
        (torch.ones(3, 2).t(), Op.SUM, 1.0, False),  # not in one piece: it has to be copied
        (torch.ones(1).expand(4), Op.SUM, 1.0, False),  # a sum's gradient: one element in memory
        (torch.arange(8.0)[::2], Op.SUM, 1.0, False),
        (torch.ones(3), Op.SUM, 2.0, False),  # what is scaled before is a copy
        (torch.ones(3, dtype=torch.uint8), Op.AVERAGE, 1.0, False),  # its sum needs a wider copy
    ],
)
def test_a_group_that_reduces_into_other_memory_reads_the_tensor_itself(tensor, op, prescale, read):
    class Elsewhere(Seen):
        def allreduce_into(self, result, tensor, op, scale=1.0):
            self.read = tensor.data_ptr()
            return self.allreduce(result.copy_(tensor), op, scale)

    group, before = Elsewhere(), tensor.clone()
    _, finish = reductions.allreduce(group, [tensor], op, prescale, 1.0, [False])
    (result,) = finish()
    assert torch.equal(result, before * prescale) and result.dtype == tensor.dtype
    assert (getattr(group, "read", None) == tensor.data_ptr()) is read
    assert torch.equal(tensor, before) and result.data_ptr() != tensor.data_ptr()
