"""Adasum and SyncBatchNorm on real ranks: against the formula, and against torch's layer with everybody's batch."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.api.ops import (
    Adasum,
    Sum,
    allgather,
    allreduce,
    barrier,
    grouped_allreduce_,
)
from elastic.api.sync_batch_norm import SyncBatchNorm
from elastic.errors import CollectiveFailed, PeerLost
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from harness.ranks import Died, Ranks, in_a_world, on_all

SIZE = 2  # the unit tests take Adasum to 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from in_a_world(SIZE)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# ---- Adasum --------------------------------------------------------------------------------------


def adasum_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    if len(vectors) == 1:
        return vectors[0].double()
    middle = len(vectors) // 2
    a, b = adasum_of(vectors[:middle]), adasum_of(vectors[middle:])
    ab, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b


@on_all
def test_adasum_is_the_formula_for_each_tensor(rank, size):
    shapes = [(5,), (40, 30), (70_001,)]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        every = [[random(*shape, seed=r, dtype=dtype) + 1 for shape in shapes] for r in range(size)]
        results = [each.clone() for each in every[rank]]
        grouped_allreduce_(results, op=Adasum)
        eps = 8 * torch.finfo(dtype).eps
        for index, result in enumerate(results):
            expected = adasum_of([tensors[index] for tensors in every])
            assert torch.allclose(result.double(), expected, rtol=eps, atol=eps), (dtype, index)
            everywhere = allgather(result.reshape(1, -1))
            assert all(torch.equal(row, everywhere[0]) for row in everywhere)


@on_all
def test_adasum_of_one_tensor_is_new(rank, size):
    tensor = torch.full((3,), 2.0)
    assert allreduce(tensor, op=Adasum).tolist() == [2.0] * 3
    with contextlib.suppress(TypeError):
        allreduce(torch.ones(3, dtype=torch.int64), op=Adasum)
        raise AssertionError("integers have no Adasum")


@on_all
def test_an_optimizer_adds_up_the_ranks_steps(rank, size):
    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def backward(model: Any, of: int, step: int) -> None:
        model.zero_grad()
        model(random(8, 6, seed=10 * step + of)).square().mean().backward()

    model, user = made()
    optimizer = DistributedOptimizer(user, model.named_parameters(), op=Adasum)
    twins = [made() for _ in range(size)]
    for step in range(4):
        backward(model, rank, step)
        optimizer.step()
        before = [parameter.detach().clone() for parameter in twins[0][0].parameters()]
        for of, (twin, theirs) in enumerate(twins):
            backward(twin, of, step)
            theirs.step()
        for index, start in enumerate(before):
            places = [list(twin.parameters())[index].data for twin, _ in twins]
            total = start + adasum_of([place - start for place in places]).float()
            for place in places:
                place.copy_(total)
    for parameter, expected in zip(model.parameters(), twins[0][0].parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)
        everywhere = allgather(parameter.detach().reshape(1, -1))
        assert all(torch.equal(row, everywhere[0]) for row in everywhere)


# ---- SyncBatchNorm -------------------------------------------------------------------------------


def filled(layer: Any) -> Any:
    """A layer whose weight and bias are not ones and zeros."""
    if layer.weight is not None:
        with torch.no_grad():
            layer.weight.copy_(random(layer.num_features, seed=100).to(layer.weight.dtype))
            layer.bias.copy_(random(layer.num_features, seed=101).to(layer.bias.dtype))
    return layer


def plain_of(layer: SyncBatchNorm, dims: int) -> Any:
    """torch's own layer, with the same parameters and buffers."""
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}.get(dims)
    plain = (kind or torch.nn.BatchNorm3d)(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    plain.to(next(layer.parameters(), torch.zeros(1)).dtype).load_state_dict(layer.state_dict())
    return plain


def compare(rank: int, layer: SyncBatchNorm, batches: list[torch.Tensor], tolerance: float) -> None:
    """One step of the layer with this rank's batch, and of torch's with all of them, whose losses are added up."""
    plain = plain_of(layer, batches[0].dim())
    own = batches[rank].clone().requires_grad_()
    whole = torch.cat(batches).double().to(plain_dtype(batches[0])).requires_grad_()
    output, expected = layer(own), plain(whole)
    assert output.dtype == own.dtype and output.shape == own.shape
    factors = random(*whole.shape, seed=7)
    starts = [sum(map(len, batches[:r])) for r in range(len(batches) + 1)]
    mine = slice(starts[rank], starts[rank + 1])
    (output.double() * factors[mine]).sum().backward()
    (expected.double() * factors).sum().backward()

    def close(ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)

    assert own.grad is not None and whole.grad is not None
    close(output, expected[mine])
    close(own.grad, whole.grad[mine])
    for parameter, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        close(allreduce(parameter.grad.double(), op=Sum), theirs.grad)
    for name, buffer in layer.named_buffers():
        close(buffer, plain.state_dict()[name])


def plain_dtype(batch: torch.Tensor) -> torch.dtype:
    return torch.float64 if batch.dtype == torch.float64 else torch.float32


@on_all
def test_it_equals_torchs_layer_with_everybodys_batch(rank, size):
    for rest in [(), (7,), (5, 3), (2, 3, 2)]:
        for dtype, tolerance in [(torch.float32, 2e-5), (torch.float64, 1e-12)]:
            layer = filled(SyncBatchNorm(3, dtype=dtype))
            for seed in (0, 10):  # the second step starts from other running statistics
                layer.zero_grad()
                batches = [
                    2 * random(r + 1, 3, *rest, seed=seed + r, dtype=dtype) + r for r in range(size)
                ]
                compare(rank, layer, batches, tolerance)
    assert layer.num_batches_tracked == 2


@on_all
def test_a_rank_may_bring_nothing(rank, size):
    layer = filled(SyncBatchNorm(3))
    batches = [random(3 * (r % 2), 3, 4, seed=r) for r in range(size)]
    compare(rank, layer, batches, 2e-5)


@on_all
def test_options_of_torchs_layer_mean_the_same(rank, size):
    batches = [random(r + 1, 3, 4, seed=r) for r in range(size)]
    every: list[dict[str, Any]] = [
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
    ]
    for options in every:
        layer = filled(SyncBatchNorm(3, **options))
        for _ in range(2):
            layer.zero_grad()
            compare(rank, layer, batches, 2e-5)


@on_all
def test_half_precision_is_normalized_in_float32(rank, size):
    for dtype, tolerance in [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)]:
        batches = [random(r + 2, 3, 4, seed=r, dtype=dtype) for r in range(size)]
        compare(rank, filled(SyncBatchNorm(3)), batches, tolerance)  # as under autocast
        whole = filled(SyncBatchNorm(3)).to(dtype)
        output = whole(batches[rank])
        expected = plain_of(whole, 3).float()(torch.cat(batches).float())
        first = sum(map(len, batches[:rank]))
        assert output.dtype == whole.running_mean.dtype == dtype
        torch.testing.assert_close(
            output.float(),
            expected[first : first + len(output)],
            rtol=4 * tolerance,
            atol=4 * tolerance,
        )


@on_all
def test_a_large_mean_costs_no_digits(rank, size):
    layer = SyncBatchNorm(2, affine=False)
    batches = [random(50, 2, seed=r) + 4096 for r in range(size)]  # of which float32 keeps 11 bits
    expected = torch.nn.BatchNorm1d(2, affine=False, dtype=torch.float64)(
        torch.cat(batches).double()
    )
    output = layer(batches[rank])
    torch.testing.assert_close(
        output.double(), expected[50 * rank : 50 * rank + 50], rtol=1e-3, atol=1e-3
    )


@on_all
def test_memory_formats_are_kept(rank, size):
    channels_last = torch.channels_last
    layer = filled(SyncBatchNorm(3))
    own = random(2, 3, 4, 4, seed=rank).contiguous(memory_format=channels_last).requires_grad_()
    output = layer(own)
    assert output.is_contiguous(memory_format=channels_last)
    output.square().sum().backward()
    assert own.grad is not None and own.grad.is_contiguous(memory_format=channels_last)


@on_all
def test_evaluation_needs_nobody(rank, size):
    layer = filled(SyncBatchNorm(3))
    layer(random(4, 3, seed=rank))
    layer.eval()
    if rank == 0:
        batch = random(2, 3, seed=1)
        assert torch.equal(layer(batch), plain_of(layer, 2).eval()(batch))
        bare = SyncBatchNorm(3, track_running_stats=False).eval()
        assert torch.equal(bare(batch), plain_of(bare, 2)(batch))
    barrier()


@on_all
def test_layers_are_copied_saved_and_loaded(rank, size):
    layer = filled(SyncBatchNorm(3))
    batches = [random(r + 1, 3, seed=r) for r in range(size)]
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    loaded = SyncBatchNorm(3)
    loaded.load_state_dict(torch.load(stored))
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        compare(rank, each, batches, 2e-5)


@on_all
def test_a_model_with_it_trains_as_one_process_with_the_whole_batch(rank, size):
    def made(norm: Any) -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3), norm(4), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(36, 6), norm_of_rows(norm), torch.nn.Linear(6, 1),
        )  # fmt: skip

    def norm_of_rows(norm: Any) -> Any:
        return norm(6) if norm is SyncBatchNorm else torch.nn.BatchNorm1d(6)

    model, plain = made(SyncBatchNorm), made(torch.nn.BatchNorm2d)
    ours = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batches = [random(3, 2, 5, 5, seed=10 * step + r) for r in range(size)]
        for each, optimizer, batch in (
            (model, ours, batches[rank]),
            (plain, theirs, torch.cat(batches)),
        ):
            optimizer.zero_grad()
            each(batch).square().mean().backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_when_a_rank_is_killed_the_others_layers_raise(ranks):
    """Last, because it ends the world."""

    def train(rank: int, size: int) -> str:
        layer = SyncBatchNorm(3)
        try:
            for step in range(1000):
                if (rank, step) == (size - 1, 5):
                    os.kill(os.getpid(), signal.SIGKILL)
                layer(random(2, 3, seed=rank).requires_grad_()).sum().backward()
        except (PeerLost, CollectiveFailed) as error:
            return type(error).__name__
        return "went on"

    ranks.start(train)
    ends = [ranks.result(rank) for rank in range(SIZE)]
    assert isinstance(ends.pop(), Died)
    assert set(ends) <= {"PeerLost", "CollectiveFailed"}
