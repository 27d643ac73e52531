"""SyncBatchNorm on real ranks compared with torch's layer on the whole batch: beyond tests/conformance."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
from typing import Any

import torch

from elastic.api.ops import Sum, allreduce
from elastic.api.sync_batch_norm import SyncBatchNorm
from elastic.errors import CollectiveFailed, PeerLost
from harness.ranks import Died, fixture, join, on_all

SIZE = 2


ranks = fixture(SIZE, enter=join)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


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
def test_rank_may_have_an_empty_batch(rank, size):
    layer = filled(SyncBatchNorm(3))
    batches = [random(3 * (r % 2), 3, 4, seed=r) for r in range(size)]
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
def test_large_mean_does_not_reduce_the_accuracy(rank, size):
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


def test_layers_of_surviving_ranks_raise_when_a_rank_is_killed(ranks):
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
