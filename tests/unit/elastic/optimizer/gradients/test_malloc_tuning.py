"""What the C library is told about freed memory, with one that writes it down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.api.compression import Compression
from elastic.optimizer.gradients import malloc_tuning
from elastic.optimizer.gradients.malloc_tuning import MallocTuning
from elastic.optimizer.shard_sums.plan import ShardPlan
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from harness.small_worlds import World, net, sgd, train_once

MB = 1 << 20
KEPT = ("trim threshold", 256 * MB)


class Libc:
    """glibc, as far as it is asked. ``limit``: the highest threshold that it takes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.told: list[tuple[str, int]] = []

    def mallopt(self, option: int, value: int) -> int:
        if option == -3 and value > self.limit:
            return 0
        self.told.append(({-3: "mmap threshold", -1: "trim threshold"}[option], value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.told.append(("trim", pad))
        return 1


def test_small_gradients_do_not_change_the_malloc_thresholds():
    libc = Libc()
    memory = MallocTuning(libc, may=True)
    memory.keep(MB - 1)
    memory.filled()
    assert libc.told == []


def test_thresholds_follow_the_largest_gradient_within_bounds_and_never_fall():
    libc = Libc()
    memory = MallocTuning(libc, may=True)
    memory.keep(MB)
    assert libc.told == [KEPT, ("mmap threshold", 32 * MB)]
    memory.keep(48 * MB)
    memory.keep(2 * MB)  # a second, smaller optimizer
    memory.keep(500 * MB)
    memory.keep(500 * MB)
    assert libc.told[2:] == [("mmap threshold", 48 * MB + 4096), ("mmap threshold", 64 * MB)]


def test_memory_freed_by_a_step_is_kept_by_malloc():
    libc = Libc()
    memory = MallocTuning(libc, may=True)
    memory.keep(1000, freed=300 * MB)  # many small gradients
    assert libc.told == [("trim threshold", 556 * MB), ("mmap threshold", 32 * MB)]
    memory.keep(1000, freed=100 * MB)  # in a larger world
    memory.keep(1000, freed=1 << 40)
    assert libc.told[2:] == [("trim threshold", (1 << 31) - 1)]


def test_older_libc_gets_the_largest_accepted_threshold():
    libc = Libc(limit=32 * MB)
    memory = MallocTuning(libc, may=True)
    memory.keep(48 * MB)
    memory.keep(48 * MB)
    assert libc.told == [KEPT, ("mmap threshold", 32 * MB)]


def test_memory_of_the_first_step_is_trimmed_once():
    libc = Libc()
    memory = MallocTuning(libc, may=True)
    memory.keep(MB)
    del libc.told[:]
    memory.filled()
    memory.keep(2 * MB)
    memory.filled()
    assert libc.told == [("trim", 0)]


def test_unknown_libc_is_not_tuned():
    other: Any = SimpleNamespace()
    memory = MallocTuning(other, may=True)
    memory.keep(100 * MB)
    memory.filled()


def test_malloc_settings_of_the_user_are_kept():
    libc = Libc()
    memory = MallocTuning(libc, may=False)
    memory.keep(100 * MB)
    memory.filled()
    assert libc.told == []


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2", "LD_PRELOAD": "/usr/lib/libiomp5.so"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=1"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=1:glibc.malloc.trim_threshold=1"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "100"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "100"}, True),
        ({"LD_PRELOAD": "/usr/lib/libiomp5.so:/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"}, True),
        ({"LD_PRELOAD": "libtcmalloc_minimal.so.4"}, True),
        ({"LD_PRELOAD": "libmimalloc.so"}, True),
    ],
)
def test_custom_allocator_is_detected_from_environment_variables(environ, chosen):
    assert worker_settings.allocator_chosen(environ) is chosen


def test_optimizer_with_large_gradients_tunes_malloc_in_its_first_step(monkeypatch):
    world = World(2)
    libc = Libc()
    monkeypatch.setattr(lifecycle, "current", lambda: world)
    monkeypatch.setattr(malloc_tuning, "_of_process", MallocTuning(libc, may=True))
    for model, large in ((net(3, 2), False), (net(*[256] * 6), True), (net(1, 1 << 20, 1), True)):
        freed = sum(each.nbytes for each in model.parameters())
        told = [*libc.told, ("trim threshold", 256 * MB + freed)] if large else []
        if large and not libc.told:
            told += [("mmap threshold", 32 * MB), ("trim", 0)]
        optimizer = sgd(model)
        for _ in range(3):
            train_once(model, optimizer)
            assert libc.told == told
            optimizer.zero_grad()
    assert not torch.is_tensor(model[0].weight.grad)


def test_trim_threshold_covers_gradients_of_waiting_shards(monkeypatch):
    libc = Libc()
    monkeypatch.setattr(malloc_tuning, "_of_process", MallocTuning(libc, may=True))
    plan = ShardPlan(Compression.none)
    plan.train([torch.zeros(64 << 10) for _ in range(8)], MB)
    for waiting, freed in ((0, 2 * MB), (1, 2 * MB), (3, 6 * MB)):
        plan.keep_memory(waiting)
        told = [value for what, value in libc.told if what == "trim threshold"]
        assert told[-1] == 256 * MB + freed
