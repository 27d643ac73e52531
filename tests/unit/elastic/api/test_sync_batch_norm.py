"""SyncBatchNorm in one process: when it is torch's layer, what it refuses, and what it sends."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.api import ops
from elastic.api.sync_batch_norm import SyncBatchNorm
from elastic.errors import NotInitialized
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.protocol.messages import Place
from elastic.runtime import lifecycle
from harness.golden import raises


@pytest.fixture
def world(monkeypatch):
    """A world of two; ``others`` is what the other rank's sums are: by default it has joined, and sends zeros."""
    world = SimpleNamespace(place=Place(0, 2, 0, 2, 0, 1), sent=[], others=torch.zeros_like)

    def allreduce(tensor, name=None, op=None, process_set=None):
        assert op is ops.Sum
        world.sent.append((name, tensor.dtype, tuple(tensor.shape), process_set))
        return tensor + world.others(tensor)

    monkeypatch.setattr(lifecycle, "current", lambda: world)
    monkeypatch.setattr(ops, "allreduce", allreduce)
    return world


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def trained(layer: Any, values: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients and buffers after one step."""
    own = values.clone().requires_grad_()
    output = layer(own)
    output.square().mul(
        torch.arange(output.numel(), device=output.device).view_as(output)
    ).sum().backward()
    assert own.grad is not None
    return [output, own.grad, *(each.grad for each in layer.parameters()), *layer.buffers()]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_sync_batch_norm_in_a_world_of_one_equals_torchs_layer(world):
    world.place = Place(0, 1, 0, 1, 0, 1)
    ours, theirs = trained(SyncBatchNorm(3), batch(4, 3, 2)), torch.nn.BatchNorm1d(3)
    assert all(map(torch.equal, ours, trained(theirs, batch(4, 3, 2))))
    assert world.sent == []


def test_evaluation_needs_no_world(monkeypatch):
    def nothing():
        raise NotInitialized("call init() first")

    monkeypatch.setattr(lifecycle, "current", nothing)
    layer = SyncBatchNorm(3)
    with pytest.raises(NotInitialized):
        layer(batch(4, 3))
    layer.eval()
    assert torch.equal(layer(batch(4, 3)), torch.nn.BatchNorm1d(3).eval()(batch(4, 3)))


def test_sync_batch_norm_beside_a_joined_rank_equals_torchs_layer(world):
    for shape in [(4, 3), (4, 3, 5), (2, 3, 4, 4), (2, 3, 2, 2, 2)]:
        kind = [torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d]
        theirs = kind[max(0, len(shape) - 3)](3)
        close(trained(SyncBatchNorm(3), batch(*shape)), trained(theirs, batch(*shape)))


def test_beside_a_rank_with_the_same_batch_statistics_do_not_change(world):
    world.others = torch.clone
    ours = trained(SyncBatchNorm(3, track_running_stats=False), batch(4, 3))
    close(ours, trained(torch.nn.BatchNorm1d(3, track_running_stats=False), batch(4, 3)))


def test_one_small_message_is_sent_in_each_direction(world):
    trained(SyncBatchNorm(3), batch(4, 3, 2))
    assert world.sent == [
        ("sync_batch_norm.forward.3", torch.float64, (3, 3), global_process_set),
        ("sync_batch_norm.backward.3", torch.float64, (2, 3), global_process_set),
    ]
    world.sent.clear()
    SyncBatchNorm(3)(batch(4, 3)).sum().backward()  # the input needs no gradient
    assert [name for name, *_ in world.sent] == ["sync_batch_norm.forward.3"]


def test_ranks_of_a_process_set_share_statistics(world, monkeypatch):
    pair = ProcessSet([0, 1])
    monkeypatch.setattr(ProcessSet, "size", lambda self: 2)
    layer = SyncBatchNorm(3, process_set=pair)
    trained(layer, batch(4, 3))
    assert [process_set for *_, process_set in world.sent] == [pair, pair]


def test_sync_batch_norm_is_a_torch_batch_norm_and_loads_its_state(world):
    theirs = torch.nn.BatchNorm2d(3)
    trained(theirs, batch(4, 3, 2, 2))
    layer = SyncBatchNorm(3)
    layer.load_state_dict(theirs.state_dict())
    assert isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    close([layer.eval()(batch(2, 3, 2, 2))], [theirs.eval()(batch(2, 3, 2, 2))])
    assert copy.deepcopy(layer).process_set is global_process_set


def test_inputs_that_do_not_fit_are_refused(world):
    with raises(ValueError):
        SyncBatchNorm(3)(batch(3))
    with raises(ValueError):
        SyncBatchNorm(3)(batch(2, 4))
    assert world.sent == []


def test_a_constant_channel_stays_finite(world):
    for values in (torch.full((4, 2), 3.0), torch.full((1, 2), 3.0)):
        layer = SyncBatchNorm(2)
        assert all(each.isfinite().all() for each in trained(layer, values))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of a break
@pytest.mark.slow
def test_compiled_model_may_contain_sync_batch_norm(world):
    layer = SyncBatchNorm(3)
    compiled: Any = torch.compile(
        torch.nn.Sequential(torch.nn.Linear(3, 3), layer, torch.nn.ReLU()), backend="aot_eager"
    )
    plain = copy.deepcopy(compiled._orig_mod)
    for _ in range(2):
        for model in (compiled, plain):
            model(batch(4, 3)).sum().backward()
    close([each.grad for each in compiled.parameters()], [each.grad for each in plain.parameters()])
    close(list(compiled.buffers()), list(plain.buffers()))
    assert len(world.sent) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sync_batch_norm_on_a_gpu_equals_torchs_layer(world, dtype):
    ours = trained(SyncBatchNorm(3).cuda(), batch(4, 3, 5, 5).to("cuda", dtype))
    theirs = trained(torch.nn.BatchNorm2d(3).cuda(), batch(4, 3, 5, 5).to("cuda", dtype))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-1)
