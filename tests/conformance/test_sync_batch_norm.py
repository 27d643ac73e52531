"""SyncBatchNorm: as batch normalization over the batches of all ranks together, uneven ones too."""

from __future__ import annotations

from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, works


def inputs(size: int, shape: tuple[int, ...], *, uneven: bool) -> list[torch.Tensor]:
    """Return the expected values of every rank in float64."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(2 + r * uneven, *shape, generator=generator, dtype=torch.float64) * (r + 1) + r
        for r in range(size)
    ]


def plain(channels: int, dimensions: int, **options: Any) -> Any:
    kinds: dict[int, Any] = {
        0: torch.nn.BatchNorm1d,
        1: torch.nn.BatchNorm1d,
        2: torch.nn.BatchNorm2d,
    }
    kinds[3] = torch.nn.BatchNorm3d
    return kinds[dimensions](channels, **options).double()


@everywhere()
def test_sync_batch_norm_equals_batch_norm_over_all_ranks(rank, size):
    for shape in ((4,), (4, 5), (4, 3, 3), (4, 2, 3, 2)):
        for uneven in (False, True):
            for options in ({}, {"affine": False}, {"momentum": None}, {"eps": 1e-3}):
                told = f"{shape}, uneven {uneven}, {options}"
                every = inputs(size, shape, uneven=uneven)
                ours: Any = hvd.SyncBatchNorm(4, **options).double()
                wanted = plain(4, len(shape) - 1, **options)
                # So that running statistics are updated from others than the first.
                for _ in range(2):
                    own = every[rank].clone().requires_grad_()
                    whole = torch.cat(every).requires_grad_()
                    result, reference = ours(own), wanted(whole)
                    start = sum(len(each) for each in every[:rank])
                    part = slice(start, start + len(own))
                    assert torch.allclose(result, reference[part]), told
                    result.pow(3).sum().backward()
                    reference.pow(3).sum().backward()
                    assert own.grad is not None and whole.grad is not None
                    assert torch.allclose(own.grad, whole.grad[part], atol=1e-8), told
                assert torch.allclose(ours.running_mean, wanted.running_mean), told
                assert torch.allclose(ours.running_var, wanted.running_var), told
                assert ours.num_batches_tracked == 2
                if options.get("affine", True):
                    # Each rank has its share; the optimizer's allreduce puts them together.
                    for mine, theirs in ((ours.weight, wanted.weight), (ours.bias, wanted.bias)):
                        total = hvd.allreduce(mine.grad, op=hvd.Sum)
                        assert torch.allclose(total, theirs.grad, atol=1e-8), told


@everywhere()
def test_evaluation_uses_the_running_statistics_without_communication(rank, size):
    layer = hvd.SyncBatchNorm(3)
    layer(torch.randn(4, 3) + rank)
    layer.eval()
    if rank == 0:
        own = torch.randn(1, 3)
        wanted = torch.nn.functional.batch_norm(
            own, layer.running_mean, layer.running_var, layer.weight, layer.bias
        )
        assert torch.allclose(layer(own), wanted)
    works(size)


@everywhere()
def test_sync_batch_norm_keeps_a_trained_model_equal_on_all_ranks(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), hvd.SyncBatchNorm(4), torch.nn.ReLU(), torch.nn.Flatten()
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(2, 1, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    for value in model.state_dict().values():
        rows = hvd.allgather(value.reshape(1, -1).double())
        assert all(torch.allclose(rows[0], each) for each in rows)
