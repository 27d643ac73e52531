"""Where gradients are scaled and where they lie, with a twin that always sends what we send, and among threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.api.compression import Compression
from elastic.collectives import single_rank
from elastic.collectives.interface import Op
from elastic.collectives.shared_memory import arena
from elastic.optimizer import join
from elastic.optimizer.gradients import bucket_plan, flat_buckets, gradient_reducer
from elastic.optimizer.gradients.flat_buckets import FlatBucket, Scales
from elastic.protocol.messages import Place
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from harness.fakes import collectives as fake
from harness.small_worlds import (
    AllJoin,
    MirroredGroup,
    World,
    backward,
    net,
    sgd,
    small,
    take_steps,
    train_once,
)

INSIDE = pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])


@pytest.fixture
def world(monkeypatch):
    world = World(4)
    monkeypatch.setattr(lifecycle, "current", lambda: world)
    return world


@INSIDE
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_average_is_correct_for_any_place_of_scaling(
    world, inside, factor, compression, set_to_none
):
    world.become(4, group=MirroredGroup(4, scales_inside=inside))
    model = net(3, 200, 2)
    model.append(torch.nn.Linear(2, 9000, bias=False))  # large enough to be filled in by itself
    optimizer = sgd(model, lr=0.0, compression=compression, gradient_predivide_factor=factor)
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        train_once(model, optimizer, scale=0.25)
        averaged = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    world.become(1)
    backward(model, scale=0.25)
    expected = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(averaged, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(600, 500),
        torch.randn(500, 600).t(),
        torch.randn(500).expand(600, 500),
        torch.randn(600, 1000)[:, ::2],
    ],
    ids=["contiguous", "transposed", "expanded", "strided"],
)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_large_gradient_of_any_layout_is_copied_into_its_bucket(gradient, layout, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # several copy as torch does it
    empty = torch.zeros(600, 500) if layout == "rows" else torch.zeros(500, 600).t()
    parameter = torch.nn.Parameter(empty)
    bucket = FlatBucket([parameter], [0], 300_000, torch.float32)
    assert flat_buckets.LARGE_BYTES <= 4 * 300_000
    parameter.grad = gradient
    bucket.fill(0, watch=True)
    assert parameter.grad is not gradient
    assert torch.equal(parameter.grad, gradient)
    assert torch.equal(bucket._wires[0], gradient)
    bucket.launch(single_rank.LocalCollectives(), Op.SUM)
    assert bucket.finish() is None
    assert torch.equal(parameter.grad, gradient)


def test_scaling_inside_the_group_avoids_further_passes(world):
    world.become(4, group=MirroredGroup(4, scales_inside=True))
    optimizer = sgd(model := net(3, 2), lr=0.0)
    train_once(model, optimizer)
    (bucket,) = optimizer._reducer._plan.buckets
    assert bucket.scales == Scales(reducing_over=4)
    world.become(2)
    train_once(model, optimizer)
    assert bucket.scales == Scales(finishing_over=2)


def test_half_precision_is_scaled_before_the_sum_when_the_group_does_not_scale(world):
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = sgd(torch.nn.ParameterList([parameter]), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        parameter.grad = torch.full((3,), 60_000.0, dtype=torch.float16)
        optimizer.step()
        assert parameter.grad.tolist() == [60_000.0] * 3


@INSIDE
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_joined_rank_scales_like_its_peers(threads, monkeypatch, inside, compression):
    """A group of threads breaks where ranks give different scales."""
    monkeypatch.setattr(fake.FakeCollectives, "scales_inside", inside)
    monkeypatch.setattr(gradient_reducer, "FIRST_BYTES", 0)
    monkeypatch.setattr(gradient_reducer, "FULL_BYTES", 0)
    monkeypatch.setattr(join, "FORMING_S", 0.0)
    monkeypatch.setattr(join, "submission", AllJoin(3))

    def run(rank):
        model, optimizer = small(3, 4, 2, lr=0.0, compression=compression)
        for step in range(1 if rank == 0 else 4):
            if step == 3:  # another plan takes the first one's place
                model[0].weight.requires_grad_(False)
            take_steps(model, optimizer, 1, scale=6.0)
        join.join()
        return model[-1].bias.grad.tolist()

    assert threads(3, run) == [[6.0, 6.0], [4.0, 4.0], [4.0, 4.0]]


def test_buckets_are_allocated_in_shared_memory(monkeypatch):
    asked: list[tuple[int, torch.dtype]] = []
    zeros = arena.zeros

    def watched(elements: int, dtype: torch.dtype) -> torch.Tensor:
        asked.append((elements, dtype))
        return zeros(elements, dtype)

    monkeypatch.setattr(arena, "zeros", watched)
    parameter: Any = torch.nn.Parameter(torch.zeros(16))
    FlatBucket([parameter], [0], 16, torch.float32)
    FlatBucket([parameter], [0], 16, torch.float16, marked=True)
    assert asked == [(16, torch.float32), (17, torch.float16)]


def test_refilling_a_bucket_does_not_rewrite_unchanged_gradients():
    parameter: Any = torch.nn.Parameter(torch.zeros(20_000))
    bucket = FlatBucket([parameter], [0], 20_000, torch.float32)
    bucket.scales = Scales(reducing_over=4)
    group: Any = MirroredGroup(4, scales_inside=True)
    parameter.grad = torch.ones(20_000)
    bucket.fill(0, watch=False)
    bucket.launch(group, Op.SUM)
    assert bucket.finish() is None
    written = bucket._flat._version
    bucket.fill(0, watch=False)
    assert bucket._flat._version == written
    assert bool((parameter.grad == 1.0).all())


@pytest.mark.parametrize(
    ("place", "full"),
    [
        (Place(0, 4, 0, 4, 0, 1), bucket_plan.GPU_FULL_BYTES),
        (Place(0, 4, 0, 3, 0, 2), bucket_plan.GPU_FULL_BYTES_APART),
        # Alone on the first host with this number.
        (Place(2, 4, 2, 3, 0, 1), bucket_plan.GPU_FULL_BYTES_APART),
        (Place(3, 4, 0, 1, 1, 2), bucket_plan.GPU_FULL_BYTES_APART),
    ],
)
def test_bucket_sizes_of_a_gpu_depend_only_on_the_world_and_the_threshold(world, place, full):
    world.place = place
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert gradient_reducer.bucket_bytes(world, gpu) == (bucket_plan.FIRST_BYTES, full)
    assert gradient_reducer.bucket_bytes(world, cpu) == (
        gradient_reducer.FIRST_BYTES,
        gradient_reducer.FULL_BYTES,
    )
    world.env = worker_settings.read({"HOROVOD_FUSION_THRESHOLD": "100"})
    assert gradient_reducer.bucket_bytes(world, gpu) == (100, 100)


def test_plan_is_rebuilt_when_the_bucket_size_of_the_world_changes(world, monkeypatch):
    full_at = (0, 0)
    monkeypatch.setattr(gradient_reducer, "bucket_bytes", lambda world, device: full_at)
    optimizer = sgd(model := net(3, 4, 2), lr=0.0)
    found = []
    for full in (0, 1 << 20, 1 << 20):
        full_at = (full, full)
        world.become(2)
        backward(model)
        lines = optimizer._reducer._plan.lines()
        optimizer.step()
        found.append(len(optimizer._reducer._plan.buckets))
        assert lines == optimizer._reducer._plan.lines()  # what the ranks compare
    assert found == [4, 1, 1]
