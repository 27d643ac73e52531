"""torch's DistributedSampler in a world that changes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from elastic.protocol.messages import Place
from elastic.rendezvous import distributed_samplers

SAMPLES = list(range(60))
Sampler: Any = DistributedSampler  # of any sequence


class World:
    """This worker's place, as ``elastic.run`` finds it."""

    def __init__(self) -> None:
        self.place: Place | None = None

    def enter(self, rank: int, size: int) -> None:
        self.place = Place(rank, size, rank, size, 0, 1)
        distributed_samplers.follow()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.enter(1, 3)
    distributed_samplers.install(lambda: made.place)
    yield made
    distributed_samplers.uninstall()


def sampler(**options: Any) -> Any:
    return Sampler(SAMPLES, **{"num_replicas": 3, "rank": 1} | options)


def fresh(rank: int, size: int, **options: Any) -> list[int]:
    epoch = options.pop("epoch", 0)
    made = Sampler(SAMPLES, num_replicas=size, rank=rank, **options)
    made.set_epoch(epoch)
    return list(made)


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"shuffle": False}, {"drop_last": True}])
@pytest.mark.parametrize("place", [(0, 2), (3, 4), (0, 1), (6, 7)])
def test_sampler_follows_the_world_and_keeps_its_epoch(world, options, place):
    following = sampler(**options)
    following.set_epoch(4)
    world.enter(*place)
    assert (following.rank, following.num_replicas) == place
    assert list(following) == fresh(*place, epoch=4, **options)
    assert len(following) == len(fresh(*place, epoch=4, **options))
    assert following.epoch == 4
    world.enter(1, 3)
    assert list(following) == fresh(1, 3, epoch=4, **options)


def test_sampler_in_an_unchanged_world_equals_torchs(world):
    following = sampler()
    before = dict(vars(following))
    assert list(following) == fresh(1, 3)
    world.enter(1, 3)
    assert vars(following) == before
    assert list(following) == fresh(1, 3)
    assert list(inspect.signature(Sampler).parameters)[:3] == ["dataset", "num_replicas", "rank"]


@pytest.mark.parametrize("numbers", [(1, 0), (3, 0), (2, 1), (6, 1)])
def test_sampler_with_explicit_numbers_is_not_changed(world, numbers):
    size, rank = numbers
    evaluation = sampler(num_replicas=size, rank=rank)
    world.enter(0, 2)
    assert list(evaluation) == fresh(rank, size)
    assert not distributed_samplers.follows(evaluation)


def test_sampler_modified_by_the_script_is_not_changed(world):
    placed = sampler()
    placed.rank = 2
    world.enter(0, 2)
    assert list(placed) == fresh(2, 3)
    assert not distributed_samplers.follows(placed)


class Reversed(Sampler):  # type: ignore[misc]
    """Reads the numbers in its own method."""

    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES[self.rank : self.total_size : self.num_replicas][::-1])


class Unpadded(Sampler):  # type: ignore[misc]
    """Computes its own lengths."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_samples, self.total_size = 7, 21


def test_subclass_follows_the_world_only_with_torchs_lengths(world):
    following = Reversed(SAMPLES, num_replicas=3, rank=1)
    own = Unpadded(SAMPLES, num_replicas=3, rank=1)
    world.enter(0, 2)
    assert list(following) == SAMPLES[::2][::-1]
    assert (own.num_replicas, own.rank, own.num_samples, own.total_size) == (3, 1, 7, 21)
    assert distributed_samplers.follows(following) and not distributed_samplers.follows(own)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copied_sampler_follows_the_world_when_used(world, copied):
    following = copied(sampler())
    world.enter(0, 2)
    assert len(following) == 30
    assert list(following) == fresh(0, 2)


def test_a_joining_worker_continues_from_its_provisional_place(world):
    world.enter(2, 3)
    following = sampler(rank=2)
    world.enter(1, 2)
    assert list(following) == fresh(1, 2)


def test_sampler_created_without_a_world_equals_that_of_torch(world):
    world.place = None
    plain = sampler()
    world.enter(0, 2)
    assert list(plain) == fresh(1, 3)


def test_uninstalling_restores_torchs_sampler_class():
    assert not hasattr(Sampler.__iter__, "__wrapped__")
    assert not hasattr(Sampler.__init__, "__wrapped__")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
    ],
)
def test_a_loader_with_workers_gives_the_samples_of_the_next_world(world, options):
    following = sampler(shuffle=False)
    loader: Any = DataLoader(SAMPLES, batch_size=5, sampler=following, **options)  # type: ignore[arg-type]
    assert [int(each) for batch in loader for each in batch] == SAMPLES[1::3]
    world.enter(0, 2)
    assert len(loader) == 6
    assert [int(each) for batch in loader for each in batch] == SAMPLES[::2]


def test_samplers_that_are_dropped_are_forgotten(world):
    following = sampler()
    world.enter(0, 2)
    del following
    assert distributed_samplers.count() == 0
