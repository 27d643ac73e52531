"""Memory that a newcomer touches before it joins: who gets it, that its tensors are like others, what comes back."""

from __future__ import annotations

import errno
import io
import mmap
import os
import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import elastic
from elastic.collectives.shared_memory import arena
from elastic.optimizer.gradients import gradient_reducer
from elastic.runtime import lifecycle
from elastic.state import ObjectState, TorchState, join_preparation
from elastic.state.snapshots import preallocated_memory
from elastic.state.snapshots.preallocated_memory import LEAST_BYTES, PreallocatedMemory
from harness.fakes import collectives as fake
from harness.groups import at_once
from harness.small_worlds import World

WIDTH = 1024  # its square of floats is 4 MiB
WHOLE = 4 * WIDTH * WIDTH


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(2)
    monkeypatch.setattr(gradient_reducer, "reducers", weakref.WeakSet())
    monkeypatch.setattr(lifecycle, "current", lambda: made)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    preallocated_memory.leave()


def adam(seed: int, **options) -> TorchState:
    torch.manual_seed(seed)
    net = nn.Linear(WIDTH, WIDTH, bias=False)
    return TorchState(model=net, optimizer=torch.optim.Adam(net.parameters(), **options))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_preallocated_tensors_have_their_own_storage_and_strides():
    ahead = PreallocatedMemory(4 * LEAST_BYTES)
    images = torch.randn(64, 64, 8, 16).to(memory_format=torch.channels_last)
    made = ahead.empty_like(images)
    other = ahead.empty_like(torch.empty(LEAST_BYTES, dtype=torch.bool, device="meta"))
    assert made is not None and other is not None
    assert made.stride() == images.stride()
    assert made.untyped_storage().nbytes() == images.nbytes
    made.copy_(images)
    other.fill_(True)
    assert torch.equal(made, images)
    saved = io.BytesIO()
    torch.save(made, saved)
    assert saved.tell() < images.nbytes + 10_000


def test_preallocated_memory_is_used_once_and_only_for_large_tensors():
    ahead = PreallocatedMemory(2 * LEAST_BYTES)
    half = torch.empty(LEAST_BYTES, dtype=torch.uint8)
    one, two = ahead.empty_like(half), ahead.empty_like(half)
    assert one is not None and two is not None
    assert abs(one.data_ptr() - two.data_ptr()) >= LEAST_BYTES
    assert ahead.empty_like(half) is None
    assert PreallocatedMemory(LEAST_BYTES).empty_like(torch.empty(10)) is None


def test_preallocated_pages_are_resident():
    torch.empty_like(torch.empty(1, device="meta"))  # the first imports half of torch
    preallocated_memory.make(64 << 20)
    before = faults()
    made = preallocated_memory.empty_like(torch.empty(16 << 20, device="meta"))
    made.fill_(1.0)
    assert faults() - before < 1000  # of 16,384 pages


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_memory_not_preallocated_is_requested_in_huge_pages():
    made = preallocated_memory.empty_like(torch.empty(64 << 20, dtype=torch.uint8))
    middle, inside, flags = made.data_ptr() + made.nbytes // 2, False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            inside = begin <= middle < end
        elif inside and name == "VmFlags:":
            flags = " ".join(words)
    assert "hg" in flags.split()


def test_tensor_outlives_the_release_of_preallocated_memory():
    preallocated_memory.make(2 * LEAST_BYTES)
    made = preallocated_memory.empty_like(torch.empty(LEAST_BYTES, dtype=torch.uint8)).fill_(7)
    preallocated_memory.leave()
    assert made.sum() == 7 * LEAST_BYTES
    assert preallocated_memory.empty_like(made).fill_(1).sum() == LEAST_BYTES


def test_tensors_are_allocated_normally_when_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    preallocated_memory.make(64 << 20)
    assert preallocated_memory.empty_like(torch.zeros(LEAST_BYTES)).shape == (LEAST_BYTES,)


@pytest.mark.parametrize(
    ("make", "entries"),
    [
        (lambda p: torch.optim.Adam(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), 2),
        (lambda p: torch.optim.Adagrad(p), 0),  # it has them already
    ],
)
def test_expected_bytes_equal_the_optimizer_entries_of_the_first_step(make, entries):
    net = nn.Linear(8, 8, bias=False)
    optimizer = make(net.parameters())
    state = TorchState(model=net, optimizer=optimizer)
    part = state._parts()["optimizer"]
    had = sum(e.nbytes for each in optimizer.state.values() for e in each.values() if e.dim())
    assert part.bytes_to_come() == entries * net.weight.nbytes
    net(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    made = sum(e.nbytes for each in optimizer.state.values() for e in each.values() if e.dim())
    assert made - had == entries * net.weight.nbytes
    assert part.bytes_to_come() == 0


def test_a_newcomer_receives_and_commits_in_memory_made_ahead():
    trained, fresh = adam(0), adam(1)
    step_once(trained)
    trained.save()
    join_preparation.prepare(fresh, native=True)
    ahead = preallocated_memory._ahead
    assert ahead is not None
    groups = fake.world(2, timeout_s=5.0)
    moved = at_once(lambda state, group: state.transfer(group, 0), [trained, fresh], groups)
    assert min(moved) >= 3 * WHOLE
    fresh.save()
    assert ahead._end == 4 * WHOLE, "two entries, and their copies"
    preallocated_memory.leave()
    for mine, theirs in zip(entries_of(fresh), entries_of(trained), strict=True):
        assert torch.equal(mine, theirs)
    kept = [each.clone() for each in entries_of(fresh)]
    step_once(fresh)
    fresh.restore()
    assert all(map(torch.equal, entries_of(fresh), kept))


def entries_of(state: TorchState) -> list[torch.Tensor]:
    return [each[key] for each in state.optimizer.state.values() for key in sorted(each)]


def step_once(state: TorchState) -> None:
    state.model(torch.randn(2, WIDTH)).sum().backward()
    state.optimizer.step()


def test_gradients_of_a_distributed_optimizer_find_their_pages_in_the_arena(world):
    made = arena.mine()
    if made is None:
        pytest.skip(arena.why_not())
    net = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = elastic.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    lent = made.lent
    join_preparation.prepare(TorchState(model=net, optimizer=optimizer), native=True)
    assert made.lent == lent
    before = faults()
    arena.zeros(WIDTH * WIDTH, torch.float32).fill_(1.0)
    assert faults() - before < 300  # of 1,024 pages, which are mapped in blocks


def test_expected_gradient_bytes_are_halved_by_fp16_and_unknown_for_custom_compression(world):
    class Own:
        @staticmethod
        def compress(tensor):
            return tensor, None

        @staticmethod
        def decompress(tensor, context):
            return tensor

    def size(compression) -> int:
        net = nn.Linear(8, 8, bias=False)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        found: int = elastic.DistributedOptimizer(sgd, compression=compression).gradient_bytes()
        return found

    assert size(elastic.Compression.none) == 256
    assert size(elastic.Compression.fp16) == 128
    assert size(Own) == 0


def test_state_without_tensors_preallocates_no_memory():
    join_preparation.prepare(ObjectState(step=0), native=True)
    assert preallocated_memory._ahead is None
