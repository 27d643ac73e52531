"""The sampler deals each sample once per epoch, whatever the world does; at most size-1 repeats fill the last round."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from elastic.errors import Invalid
from elastic.runtime import lifecycle
from elastic.state import ElasticSampler, TorchState
from harness.golden import raises


class World:
    """Stands in for the runtime: whichever rank is to act."""

    def __init__(self) -> None:
        self.rank, self.size, self.generation = 0, 1, 0

    def active(self) -> SimpleNamespace:
        return SimpleNamespace(
            place=SimpleNamespace(rank=self.rank, size=self.size),
            generation=self.generation,
            activity=0,
        )

    def become(self, size: int) -> None:
        self.size = size
        self.generation += 1


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(lifecycle, "active", made.active)
    return made


def dealt(world: World, samplers: list[ElasticSampler]) -> list[list[int]]:
    """What each rank is given, from now on."""
    lists = []
    for rank, sampler in enumerate(samplers):
        world.rank = rank
        lists.append(list(sampler))
    return lists


def team(world: World, size: int, length: int, **options) -> list[ElasticSampler]:
    world.become(size)
    made = []
    for rank in range(size):
        world.rank = rank
        made.append(ElasticSampler(range(length), **options))
    return made


def test_rounds_are_interleaved_and_the_last_is_filled_from_the_start(world):
    assert dealt(world, team(world, 3, 7, shuffle=False)) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]


def test_every_epoch_has_its_own_order_on_all_ranks(world):
    samplers = team(world, 2, 50, seed=3)
    first = dealt(world, samplers)
    assert sorted(first[0] + first[1]) == list(range(50))
    for sampler in samplers:
        sampler.set_epoch(1)
    assert dealt(world, samplers) != first


def test_sampler_has_horovods_attributes(world):
    (sampler,) = team(world, 1, 10, shuffle=False, seed=5)
    sampler.record_batch(0, 4)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
    sampler.reset()
    assert (sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size) == (
        1,
        0,
        6,
        6,
    )
    assert sampler.remaining_indices == [4, 5, 6, 7, 8, 9]
    assert sampler.processed_indices == set()
    assert (len(sampler), sampler.seed, sampler.shuffle) == (6, 5, False)


def test_data_loader_accepts_the_sampler(world):
    (sampler,) = team(world, 1, 10, shuffle=False)
    loader: Any = DataLoader(TensorDataset(torch.arange(10)), batch_size=4, sampler=sampler)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(type(index) is int for index in sampler)


def test_defect_f_remainder_smaller_than_half_the_world_is_distributed(world):
    samplers = team(world, 1, 9, shuffle=False)
    samplers[0].record_batch(0, 8)  # one sample left
    saved = samplers[0].state_dict()
    samplers = team(world, 4, 9, shuffle=False)
    for rank, sampler in enumerate(samplers):
        world.rank = rank
        sampler.load_state_dict(saved)
    assert dealt(world, samplers) == [[8], [0], [1], [2]]


def test_defect_g_planned_change_redistributes_the_remaining_samples(world):
    samplers = team(world, 2, 12, shuffle=False)
    for sampler in samplers:
        sampler.record_batch(0, 2)  # 0 .. 3 are done
    world.become(1)
    world.rank = 0
    state = TorchState(sampler=samplers[0])
    state.on_reset()
    assert list(samplers[0]) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_defect_g_remaining_samples_are_redistributed_without_a_reset(world):
    samplers = team(world, 2, 12, shuffle=False)
    samplers[0].record_batch(0, 2)
    world.become(1)
    world.rank = 0
    assert len(samplers[0]) == 8
    assert list(samplers[0]) == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("said", [1, 4], ids=["its real size", "the loader's batch size"])
def test_defect_v_last_batch_of_an_epoch_may_be_partial(world, said):
    samplers = team(world, 2, 10, shuffle=False)  # 5 samples each: batches of 4 and 1
    for sampler in samplers:
        sampler.record_batch(0, 4)
        sampler.record_batch(1, said)
    assert [sampler.processed_num for sampler in samplers] == [10, 10]
    world.become(1)
    world.rank = 0
    assert list(samplers[0]) == []


def test_dataset_smaller_than_the_world_gives_each_rank_one_sample(world):
    assert dealt(world, team(world, 5, 2, shuffle=False)) == [[0], [1], [0], [1], [0]]


def test_finished_epoch_has_no_samples_until_the_next_begins(world):
    (sampler,) = team(world, 1, 4)
    sampler.record_batch(0, 4)
    sampler.load_state_dict(sampler.state_dict())
    assert (list(sampler), len(sampler), sampler.remaining_indices) == ([], 0, [])
    sampler.set_epoch(1)
    assert len(list(sampler)) == 4


def test_invalid_dataset_and_batch_size_are_refused(world):
    with raises(Invalid):
        ElasticSampler([])
    with raises(Invalid):
        ElasticSampler(iter([1]))  # type: ignore[arg-type]
    sampler = ElasticSampler([1, 2])
    for size in (0, -3):
        with pytest.raises(Invalid, match=f"batch_size is {size}"):
            sampler.record_batch(0, size)
    assert sampler.processed_num == 0


def test_progress_beyond_a_shrunken_dataset_ends_the_epoch(world):
    (sampler,) = team(world, 1, 4)
    sampler.load_state_dict({"epoch": 0, "processed_num": 99})
    assert list(sampler) == []


# What may happen between two rounds of training: batches, a commit, a failure, a planned change.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 3)),
        st.tuples(st.just("commit"), st.just(0)),
        st.tuples(st.just("fail"), st.integers(1, 6)),
        st.tuples(st.just("change"), st.integers(1, 6)),
    ),
    max_size=25,
)


@settings(max_examples=2 * settings().max_examples)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 6),
    batch=st.integers(1, 4),
    nominal=st.booleans(),
    shuffle=st.booleans(),
    events=EVENTS,
)
def test_each_sample_counts_once_for_any_changes_of_the_world(
    length, size, batch, nominal, shuffle, events
):
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "active", world.active)
        samplers = team(world, size, length, shuffle=shuffle)
        committed, saved = Counter[int](), samplers[0].state_dict()
        seen = Counter[int]()  # since the last commit
        queues = dealt(world, samplers)
        batches, largest = 0, size

        def train(count: int) -> None:
            nonlocal batches
            for _ in range(count):
                for rank, sampler in enumerate(samplers):
                    taken, queues[rank] = queues[rank][:batch], queues[rank][batch:]
                    seen.update(taken)
                    if taken:
                        sampler.record_batch(batches, batch if nominal else len(taken))
                batches += 1

        def commit() -> None:
            nonlocal saved
            committed.update(seen)
            seen.clear()
            saved = samplers[0].state_dict()
            assert all(sampler.state_dict() == saved for sampler in samplers)

        def regroup(size: int) -> None:
            """Survivors keep their samplers, newcomers are sent rank 0's progress."""
            nonlocal largest
            largest = max(largest, size)
            world.become(size)
            while len(samplers) < size:
                world.rank = len(samplers)
                samplers.append(ElasticSampler(range(length), shuffle=shuffle))
            del samplers[size:]
            for rank, sampler in enumerate(samplers):
                world.rank = rank
                sampler.load_state_dict(saved)
            queues[:] = dealt(world, samplers)

        for kind, number in [*events, ("train", length), ("commit", 0)]:
            if kind == "train":
                train(number)
            elif kind == "commit":
                commit()
            elif kind == "change":
                commit()
                regroup(number)
            else:
                seen.clear()
                regroup(number)

        assert set(committed) == set(range(length))
        # Repeats fill one round, the last that was committed.
        assert committed.total() - length < largest
