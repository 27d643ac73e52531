"""Adasum among threads: compared with its formula, computed recursively over whole vectors in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from elastic.collectives.algorithms import adasum
from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import CollectiveFailed, Invalid
from harness.adasum import adasum_of
from harness.fakes import collectives as fake
from harness.golden import raises
from harness.groups import at_once

SHAPES = [(), (0,), (1,), (127,), (128,), (129,), (3, 5, 7), (1000,), (40_000,)]


def random(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Neither parallel to other ranks' nor orthogonal."""
    generator = torch.Generator().manual_seed(rank + 1)
    return (torch.randn(shape, generator=generator) + 0.5).to(dtype)


def reduced(per_rank: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return the result on every rank."""
    groups = fake.world(len(per_rank))

    def on_rank(rank: int) -> list[torch.Tensor]:
        tensors = [tensor.clone() for tensor in per_rank[rank]]
        try:
            adasum.reduce_(groups[rank], tensors)
        except BaseException:
            groups[rank].abort()
            raise
        return tensors

    return at_once(on_rank, range(len(per_rank)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_adasum_matches_its_formula_for_each_tensor(size, dtype):
    inputs = [[random(rank, shape, dtype) for shape in SHAPES] for rank in range(size)]
    results = reduced(inputs)
    for index, shape in enumerate(SHAPES):
        expected = adasum_of([tensors[index] for tensors in inputs])
        result = results[0][index]
        assert (result.shape, result.dtype) == (shape, dtype)
        # Half precision is rounded once, at the end.
        eps = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 16)
        assert torch.allclose(result.double(), expected, rtol=eps, atol=eps)
        for other in results:
            assert torch.equal(other[index], result)


def test_opposite_vectors_cancel():
    vector = random(0, (300,))
    results = reduced([[vector], [-vector]])
    assert all(torch.equal(result, torch.zeros(300)) for (result,) in results)


def test_zero_vectors_do_not_change_the_result():
    vector, zeros = random(0, (300,)), torch.zeros(300)
    for order in itertools.permutations([vector, zeros, zeros, zeros]):
        assert all(torch.equal(result, vector) for (result,) in reduced([[each] for each in order]))
    assert all(torch.equal(result, zeros) for (result,) in reduced([[zeros]] * 2))


@pytest.mark.parametrize("scale", [1e-200, 1e-35, 1e38])
def test_magnitude_of_vectors_does_not_affect_the_accuracy(scale):
    dtype = torch.float64 if scale < 1e-100 else torch.float32
    inputs = [random(rank, (300,), dtype) * scale / 100 for rank in range(2)]
    results = reduced([[each] for each in inputs])
    # Squares of float64 may vanish: then the vectors are simply added.
    expected = sum(inputs) if scale < 1e-100 else adasum_of(inputs)
    assert all(
        torch.allclose(result.double() / scale, expected / scale, rtol=1e-5)
        for (result,) in results
    )


def test_non_finite_values_reach_every_rank_and_only_their_tensor():
    for bad in (float("inf"), float("nan")):
        inputs = [[torch.ones(500), torch.ones(300)] for _ in range(4)]
        inputs[2][0][7] = bad
        for spoiled, whole in reduced(inputs):
            assert not spoiled.isfinite().any()
            assert torch.equal(whole, torch.ones(300))


def test_dtypes_may_be_mixed():
    inputs = [
        [random(rank, (200,), dtype) for dtype in (torch.float16, torch.float64, torch.float16)]
        for rank in range(2)
    ]
    for results in reduced(inputs):
        for index, result in enumerate(results):
            expected = adasum_of([tensors[index] for tensors in inputs])
            assert result.dtype == inputs[0][index].dtype
            assert torch.allclose(result.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [0, 3, 5, 6, 7, 12])
def test_rank_count_that_is_no_power_of_two_is_refused(size):
    with raises(Invalid, size):
        adasum.check(size)


def test_size_and_dtypes_are_checked_before_any_message_is_sent():
    class Silent(LocalCollectives):
        size = 3  # and every call of a LocalCollectives returns at once

    tensor = torch.ones(3)
    with raises(ValueError):
        adasum.reduce_(Silent(), [tensor])
    with raises(TypeError):
        adasum.reduce_(fake.world(2)[0], [tensor, torch.ones(3, dtype=torch.int64)])
    assert torch.equal(tensor, torch.ones(3))


def test_broken_group_leaves_tensors_unchanged():
    group, other = fake.world(2)
    other.abort()
    tensor = torch.ones(300)
    with pytest.raises(CollectiveFailed):
        adasum.reduce_(group, [tensor])
    assert torch.equal(tensor, torch.ones(300))


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_slices_of_all_ranks_make_up_the_vector(size):
    starts = [adasum.slice_start(rank, size, 4 * size) for rank in range(size)]
    assert sorted(starts) == [4 * rank for rank in range(size)]


def test_a_rank_sends_no_more_than_in_an_allreduce():
    size, elements = 8, 64 * 1024
    sent_bytes: list[int] = []

    class Counting(fake.FakeCollectives):
        def alltoall(self, output, tensor, received, sent):
            sent_bytes.append(tensor.numel() * tensor.element_size())
            return super().alltoall(output, tensor, received, sent)

        def allgather(self, outputs, tensor):
            sent_bytes.append(tensor.numel() * tensor.element_size() * (self.size - 1))
            return super().allgather(outputs, tensor)

    groups = fake.world(size)
    for group in groups:
        group.__class__ = Counting
    at_once(lambda group: adasum.reduce_(group, [torch.ones(elements)]), groups)
    dots = size * size * 24 * 2
    assert sum(sent_bytes) <= size * 2 * (size - 1) / size * elements * 4 + dots


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adasum_on_a_gpu_matches_its_formula(dtype):
    inputs = [[random(rank, (n,), dtype).cuda() for n in (5, 3000)] for rank in range(4)]
    for results in reduced(inputs):
        for index, result in enumerate(results):
            expected = adasum_of([tensors[index].cpu() for tensors in inputs])
            assert result.is_cuda
            assert torch.allclose(result.cpu().double(), expected, rtol=2e-3, atol=2e-3)
