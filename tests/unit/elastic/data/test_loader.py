"""A loader in a script: epochs, commits, breaks, and refused arguments."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler

import elastic
from elastic.data import DataLoader, ElasticSampler, ShardedFiles, from_torch
from elastic.data.sample_partition import Position
from elastic.errors import Invalid, NotInitialized
from elastic.protocol.messages import Place
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from elastic.state import TorchState, sampler
from harness.golden import raises, recorded


def world(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, generation: int = 1) -> None:
    found = Place(rank, size, 0, 1, rank, size), generation
    monkeypatch.setattr(lifecycle, "position", lambda: found)


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [each for batch in batches for each in batch]


def gradient(model: torch.nn.Linear) -> float:
    assert model.weight.grad is not None
    return model.weight.grad.item()


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Augmented:
    """Random parts come from all three generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(numpy.random.rand()), float(torch.rand(()))


# ---- expectations of users -------------------------------------------------------------------------------------------


def test_data_loader_and_sampler_are_public_names():
    assert elastic.data.DataLoader is DataLoader
    assert sampler.ElasticSampler is ElasticSampler is elastic.ElasticSampler


def test_an_epoch_ends_and_the_next_has_another_order():
    loader = DataLoader(range(10), batch_size=4, shuffle=True)
    TorchState(loader=loader)
    first, second = lists(loader), lists(loader)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(10))
    assert first != second
    assert (len(loader), loader.epoch, loader.position) == (3, 2, Position(2, 0))


def test_order_equals_a_distributed_sampler():
    dataset: Any = range(10)
    drawing: Any = DistributedSampler(dataset, num_replicas=1, rank=0, seed=3)
    drawing.set_epoch(2)
    loader = DataLoader(range(10), batch_size=10, shuffle=True, seed=3)
    loader.set_epoch(2)
    assert lists(loader) == [list(drawing)]


def test_set_epoch_before_each_epoch_keeps_a_restored_position():
    loader = DataLoader(range(10), batch_size=2)
    state = TorchState(loader=loader, epoch=0)
    for epoch in range(state.epoch, 1):
        loader.set_epoch(epoch)
        for index, _ in enumerate(loader):
            if index == 1:
                state.commit()
                break
    state.restore()
    loader.set_epoch(state.epoch)
    assert lists(loader) == [[4, 5], [6, 7], [8, 9]]
    loader.set_epoch(7)
    assert (loader.position, loader.remaining) == (Position(7, 0), 5)


def test_iteration_after_a_break_continues_at_the_same_position():
    loader = DataLoader(range(10), batch_size=4)
    TorchState(loader=loader)
    for _ in loader:
        break
    assert (loader.remaining, lists(loader)) == (2, [[4, 5, 6, 7], [8, 9]])


def test_a_loader_without_a_state_restarts_each_time():
    loader = DataLoader(range(10), batch_size=4)
    for _ in loader:
        break
    assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_each_rank_has_its_part_and_all_have_equally_many_steps(monkeypatch):
    parts = []
    for rank in range(3):
        world(monkeypatch, rank, 3)
        loader = DataLoader(range(8), batch_size=2)
        parts.append(lists(loader))
        assert len(loader) == 2
    # The second step would have two samples for three ranks: the two are shared.
    assert parts == [[[0, 1], [4, 5]], [[2], [6]], [[3], [7]]]


def test_batch_size_larger_than_the_dataset_is_one_step(monkeypatch):
    world(monkeypatch, 1, 2)
    loader = DataLoader(range(5), batch_size=100)
    assert (len(loader), lists(loader), loader.weight) == (1, [[3, 4]], 0.8)


def test_rank_without_a_sample_gets_one_with_weight_zero(monkeypatch):
    world(monkeypatch, 2, 3)
    model = torch.nn.Linear(1, 1, bias=False)
    loader = DataLoader([torch.ones(1)] * 2, batch_size=1)
    TorchState(model, loader=loader)
    for batch in loader:
        model(batch).sum().backward()
        assert (loader.weight, gradient(model)) == (0.0, 0.0)
    model(batch).sum().backward()  # the pass is over: others count
    assert gradient(model) == 1.0


def test_a_change_of_the_world_redistributes_the_rest(monkeypatch):
    world(monkeypatch, 0, 2)
    loader = DataLoader(range(12), batch_size=2)
    state = TorchState(loader=loader)
    passing = iter(loader)
    assert next(passing).tolist() == [0, 1]
    world(monkeypatch, 0, 1, generation=2)
    state.on_reset()
    # Even the old iterator continues correctly.
    assert lists(passing) == [[4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.slow
def test_prefetched_batches_of_loader_workers_are_not_consumed():
    loader = DataLoader(range(40), batch_size=2, num_workers=2, prefetch_factor=4)
    state = TorchState(loader=loader)
    for _ in loader:
        state.commit()
        break
    state.restore()
    for batch in loader:
        assert batch.tolist() == [2, 3]
        break


@pytest.mark.slow
def test_another_number_of_loader_workers_or_batch_size_continues_at_the_same_sample():
    first = DataLoader(range(10), batch_size=3)
    TorchState(loader=first)
    for _ in first:
        break
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    second = DataLoader(range(10), batch_size=2, num_workers=1)
    TorchState(loader=second)
    second.load_state_dict(saved)
    assert lists(second) == [[3, 4], [5, 6], [7, 8], [9]]
    assert first.layout() == second.layout()


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_loader_state_is_small_for_any_dataset(size):
    loader = DataLoader(range(size), batch_size=2)
    TorchState(loader=loader)
    next(iter(loader))
    assert len(pickle.dumps(loader.state_dict())) < 200


def test_commit_within_an_accumulation_repeats_its_batches_after_a_restore():
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loader = DataLoader(range(8), batch_size=1)
    state = TorchState(optimizer=optimizer, loader=loader)
    for index, batch in enumerate(loader):
        weight[batch].sum().backward()
        state.commit()
        if index == 2:
            break
        if index == 1:
            optimizer.step()
            optimizer.zero_grad()
    state.restore()
    # The last commit came after one step, and in the middle of another.
    assert loader.position == Position(0, 2)
    assert weight.tolist() == [-1.0, -1.0] + [0.0] * 6


@pytest.mark.slow
def test_sample_seeds_do_not_depend_on_the_loading_process():
    before = torch.get_rng_state()
    (alone,) = DataLoader(Augmented(), batch_size=6, sample_seeds=True)
    assert torch.equal(before, torch.get_rng_state())
    workers = DataLoader(Augmented(), batch_size=2, num_workers=2, sample_seeds=True)
    for one, all_of_them in zip(zip(*workers, strict=True), alone, strict=True):
        assert torch.equal(torch.cat(one), all_of_them)
    other_epoch = DataLoader(Augmented(), batch_size=6, sample_seeds=True)
    other_epoch.set_epoch(1)
    assert not torch.equal(next(iter(other_epoch))[1], alone[1])


def test_iterating_does_not_advance_the_global_generator():
    before = torch.get_rng_state()
    lists(DataLoader(range(4), shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


def test_shards_divide_each_step_of_a_loader(monkeypatch):
    world(monkeypatch, 1, 2)
    loader = DataLoader(range(11), global_batch_size=8, shards=4)
    steps = []
    for step in loader:
        steps.append([(loader.shard, batch.tolist()) for batch in step])
    assert steps == [[(2, [4]), (3, [5])], [(2, [9]), (3, [10])]]
    world(monkeypatch, 4, 5)
    assert [list(step) for step in loader] == [[], []]  # a spare takes part in the steps


def test_shards_of_a_run_determine_the_batches_of_a_rank(monkeypatch):
    world(monkeypatch, 1, 3)
    shards = elastic.Shards(4)
    loader = DataLoader(range(11), global_batch_size=8, shards=shards)
    for name in ("held", "assigned"):
        monkeypatch.setattr(type(shards), name, (1, 3))
    assert [[batch.tolist() for batch in step] for step in loader] == [[[2, 3], [5]], [[8], [10]]]


def test_sharded_files_are_each_opened_once():
    opened = []

    def read(file: range) -> Any:
        opened.append(file)
        return iter(file)

    dataset = ShardedFiles([range(5), range(5, 7), range(7, 12)], read, lengths=[5, 2, 5])
    loader = DataLoader(dataset, batch_size=3, shuffle=True)
    assert sorted(flat(lists(loader))) == list(range(12))
    assert len(opened) == 4  # once each, and one to see how files are read


# ---- other loaders ---------------------------------------------------------------------------------------------------


def test_random_numbers_drawn_while_opening_a_file_do_not_advance_the_generator():
    files = ShardedFiles(range(2), lambda number: [number + torch.rand(3)], [1, 1])
    before = torch.get_rng_state()
    assert int(files[1].max()) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_loaders_created_for_torch_are_converted():
    nine: Any = range(9)
    dealing: Any = DistributedSampler(nine, num_replicas=4, rank=2, seed=1)
    loader = from_torch(TorchLoader(nine, 3, sampler=dealing), drop_last=True)
    recorded("messages", (loader.layout(), loader.drop_last))
    loader = from_torch(TorchLoader(nine, 3, shuffle=True), seed=4)
    recorded("messages", loader.layout())
    weighted = WeightedRandomSampler([0.0, 1.0, 0.0], 5)
    assert lists(from_torch(TorchLoader(nine, 2, sampler=weighted))) == [[1, 1], [1, 1], [1]]
    assert lists(from_torch(TorchLoader(Stream(5), 2))) == [[0, 1], [2, 3], [4]]
    batches: Any = TorchLoader(nine, batch_sampler=[[0, 1, 2], [3], [4]])
    assert lists(from_torch(batches)) == [[0, 1, 2], [3], [4]]
    whole: Any = TorchLoader([torch.ones(2)], None)  # type: ignore[arg-type]
    assert lists(from_torch(whole)) == [[1.0, 1.0]]
    with raises(Invalid):
        from_torch([1, 2])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ([], {}),
        (5, {}),
        (iter([1]), {}),
        (SimpleNamespace(__getitem__=1), {}),
        ([1], {"shuffle": True, "sampler": [0]}),
        ([1], {"sampler": [0], "batch_sampler": [[0]]}),
        ([1], {"sampler": ElasticSampler([1])}),
        ([1], {"batch_size": 0}),
        ([1], {"batch_size": True}),
        ([1], {"batch_size": 2, "global_batch_size": 8}),
        ([1], {"batch_sampler": [[0]], "batch_size": 2}),
        ([1], {"shards": 2}),
        ([1], {"shards": 4, "global_batch_size": 3}),
        ([1], {"generator": torch.Generator()}),
        ([1], {"in_order": False}),
        ([1], {"num_wokers": 2}),
        (Stream(3), {"shuffle": True}),
    ],
)
def test_invalid_datasets_and_options_are_refused(dataset, options):
    with raises(Invalid):
        DataLoader(dataset, **options)


def test_random_sampler_with_its_own_generator_is_refused():
    own = torch.Generator()
    with raises(Invalid):
        DataLoader(range(9), sampler=WeightedRandomSampler([1.0] * 9, 9, generator=own))


def test_two_passes_at_once_are_refused():
    loader = DataLoader(range(4))
    with raises(Invalid):
        list(zip(loader, loader, strict=True))


def test_an_epoch_that_would_always_be_empty_is_refused():
    loader = DataLoader(range(3), batch_size=4, drop_last=True)
    with raises(Invalid):
        list(loader)


def test_a_dataset_that_grows_within_an_epoch_is_refused():
    dataset = list(range(6))
    loader = DataLoader(dataset, batch_size=2)
    TorchState(loader=loader)
    for _ in loader:
        break
    dataset.append(6)
    with raises(Invalid):
        list(loader)


def test_unrequested_shards_are_refused():
    loader = DataLoader(range(8), global_batch_size=4, shards=2)
    steps = iter(loader)
    next(next(steps))
    with raises(Invalid):
        next(steps)


def test_a_loader_is_made_before_init_and_iterated_after(monkeypatch):
    env = worker_settings.read(
        {"ELASTIC_DRIVER": "127.0.0.1:1", "ELASTIC_WORKER": "localhost:0#1", "ELASTIC_SECRET": "00"}
    )
    monkeypatch.setattr(worker_settings, "read", lambda: env)
    loader = DataLoader(range(4))
    with raises(NotInitialized):
        list(loader)
    world(monkeypatch, 0, 2)
    assert lists(loader) == [[0], [2]]


def test_a_negative_epoch_is_refused():
    with raises(Invalid):
        DataLoader(range(4)).set_epoch(-1)
