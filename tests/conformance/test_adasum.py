"""Adasum: equal gradients count once, orthogonal ones in full; among 2, 4, ... ranks."""

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works
from harness.adasum import adasum_of


@everywhere(2, 4)
def test_adasum_of_equal_and_orthogonal_vectors(rank, size):
    same = torch.tensor([3.0, -4.0, 0.5])
    assert torch.allclose(hvd.allreduce(same, op=hvd.Adasum), same)
    unit = torch.zeros(size)
    unit[rank] = rank + 1.0
    wanted = torch.arange(1.0, size + 1)
    assert torch.allclose(hvd.allreduce(unit, op=hvd.Adasum, name="orthogonal"), wanted)
    assert torch.equal(hvd.allreduce(torch.zeros(5), op=hvd.Adasum), torch.zeros(5))


@everywhere(2, 4)
def test_adasum_matches_its_formula_for_any_length_and_dtype(rank, size):
    for length in (1, 2, 3, 7, 64, 1001):
        every = [
            torch.randn(length, generator=torch.Generator().manual_seed(10 * length + r))
            for r in range(size)
        ]
        wanted = adasum_of([vector.double() for vector in every])
        for dtype, tolerance in (
            (torch.float64, 1e-6),
            (torch.float32, 1e-4),
            (torch.float16, 2e-2),
        ):
            own = every[rank].to(dtype, copy=True)
            result = hvd.allreduce(own, op=hvd.Adasum, name=f"{length} {dtype}")
            assert result.dtype == dtype
            assert torch.allclose(result.double(), wanted, rtol=tolerance, atol=tolerance), (
                length,
                dtype,
            )
            kept = hvd.allreduce_(own, op=hvd.Adasum)
            assert kept is own and torch.equal(kept, result)


@everywhere(2, 4)
def test_adasum_of_fused_and_grouped_tensors_equals_separate_ones(rank, size):
    """Fused or in a group, the result is the same as alone."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(n + 1, generator=generator) for n in range(6)]
    alone = [hvd.allreduce(tensor, op=hvd.Adasum) for tensor in tensors]
    grouped = hvd.grouped_allreduce(tensors, op=hvd.Adasum)
    handles = [hvd.allreduce_async(t, op=hvd.Adasum, name=f"a{n}") for n, t in enumerate(tensors)]
    fused = [hvd.synchronize(handle) for handle in handles]
    for one, two, three in zip(alone, grouped, fused, strict=True):
        assert torch.allclose(one, two, rtol=1e-5) and torch.allclose(one, three, rtol=1e-5)
    bits = torch.cat(alone).view(torch.int32)
    assert torch.equal(hvd.allreduce(bits, op=hvd.Max), hvd.allreduce(bits, op=hvd.Min))


@everywhere(3)
def test_three_ranks_can_not_be_paired(rank, size):
    with raises((ValueError, hvd.HorovodInternalError), "3"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    works(size)


@everywhere(2, 4)
def test_adasum_optimizer_combines_the_local_steps_of_all_ranks(rank, size):
    """Every rank makes its own step; the differences are combined. Equal gradients: as one rank alone."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    (weight * torch.tensor([1.0, 3.0])).sum().backward()
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([0.5, 0.5]))
    optimizer.zero_grad()
    target = torch.zeros(2)
    target[rank % 2] = 1.0
    (weight * target).sum().backward()
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([0.0, 0.0]), atol=1e-6)
    with raises(AssertionError), optimizer.skip_synchronize():
        pass
    works(size)
