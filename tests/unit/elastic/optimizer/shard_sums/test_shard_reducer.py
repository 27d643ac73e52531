"""Steps of a fixed number of shards in worlds of every size, of ranks as threads: equal bits, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import numpy
import pytest
import torch

import elastic
from elastic import context
from elastic.api.compression import Compression, NoneCompressor
from elastic.api.sync_batch_norm import SyncBatchNorm
from elastic.collectives.interface import Op
from elastic.data import DataLoader, ShardedFiles
from elastic.errors import Invalid, StateMismatch
from elastic.exact import load_balancing
from elastic.exact.shard_step import StepListener
from elastic.exact.shards import Shards
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.shard_sums.buckets import ShardBucket
from elastic.optimizer.shard_sums.reducer import ShardReducer
from elastic.protocol.messages import Place
from elastic.runtime import lifecycle
from elastic.state import TorchState
from harness.golden import raises, recorded
from harness.refusals import refusal_of
from harness.small_worlds import drawn, net, set_drawn, shard_ranks_as_threads
from simulation.test_shard_schedules import (
    a_lost_partial,
    a_stale_buffer,
    sums_in_the_order_of_ranks,
)

STEPS = 3
SHARDS = [1, 3, 5, 8]


@pytest.fixture
def ranks(monkeypatch):
    return shard_ranks_as_threads(monkeypatch)


class Network(torch.nn.Module):
    """With running statistics, a queue that grows, a parameter that no shard but the third one uses, and one that none
    does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 300, device="meta")
        self.norm = torch.nn.BatchNorm1d(300)
        self.last = torch.nn.Linear(300, 2, device="meta")
        self.rare = torch.nn.Parameter(torch.ones(7))
        self.never = torch.nn.Parameter(torch.ones(3))
        self.to_empty(device="cpu")
        self.norm.reset_running_stats()
        self.register_buffer("queue", torch.zeros(0, 2))
        self.register_buffer("mask", torch.ones(1).expand(2))
        set_drawn(self)

    def forward(self, inputs: torch.Tensor, shard: int) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(inputs)).relu()) * self.get_buffer(
            "mask"
        )
        self.queue = torch.cat([self.get_buffer("queue"), found.detach()])
        found = found - self.queue.mean(0)
        return found + self.rare.sum() if shard == 2 else found


def train(
    count: int,
    dtype: torch.dtype = torch.float32,
    compression: Any = Compression.none,
    **options: Any,
) -> Any:
    """Losses, gradients of the last step, weights, moments and buffers of a rank, as bytes."""
    model = Network().to(dtype)
    shards = Shards(count, **options)
    shards.watch(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        compression,
        shards=shards,
    )
    losses = []
    for step in range(STEPS):
        found = []
        for shard in shards:
            statistics = model.norm.get_buffer("running_mean")
            before = statistics.clone()
            loss = model(drawn(4, 5, seed=1000 * step + shard).to(dtype), shard).square().mean()
            loss.backward()
            found.append(loss.detach())
            assert not torch.equal(before, statistics)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(shards.mean(found))
    assert shards.step == STEPS
    tensors: list[Any] = [parameter.grad for parameter in model.parameters()]
    tensors += model.parameters()
    tensors += model.buffers()
    tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
    return losses, [
        each.detach().flatten().contiguous().view(torch.uint8).clone() for each in tensors
    ]


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (3, torch.float32),
        *(pytest.param(n, torch.float32, marks=pytest.mark.slow) for n in SHARDS if n != 3),
        pytest.param(5, torch.bfloat16, marks=pytest.mark.slow),
        *(pytest.param(n, torch.bfloat16, marks=pytest.mark.nightly) for n in SHARDS if n != 5),
    ],
    ids=str,
)
def test_sharded_training_has_the_same_bits_in_every_world(ranks, count, dtype):
    (alone,) = ranks(1, lambda rank: train(count, dtype))
    for size in (2, 3, 4, 7):
        for found in ranks(size, lambda rank: train(count, dtype)):
            assert same(alone, found), size


@pytest.mark.slow
@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compressed_gradients_have_the_same_bits_in_every_world(ranks, compression):
    (alone,) = ranks(1, lambda rank: train(5, compression=compression))
    (plain,) = ranks(1, lambda rank: train(5))
    assert alone[0] == pytest.approx(plain[0], rel=0.02) and not same(alone, plain)
    for size in (2, 3, 7):
        for found in ranks(size, lambda rank: train(5, compression=compression)):
            assert same(alone, found), size


@pytest.mark.parametrize("exact", [True, False])
def test_complex_gradients_are_equal_in_every_world(ranks, exact):
    def rank(_: int) -> torch.Tensor:
        phase = torch.nn.Parameter(torch.ones(90, dtype=torch.complex64))
        shards = Shards(5, exact=exact)
        optimizer = DistributedOptimizer(
            torch.optim.SGD([phase], lr=0.1), [("phase", phase)], shards=shards
        )
        for step in range(STEPS):
            for shard in shards:
                real, imaginary = drawn(2, 90, seed=10 * step + shard)
                (phase * torch.complex(real, imaginary)).real.sum().backward()
            optimizer.step()
        return phase.detach()

    (alone,) = ranks(1, rank)
    assert alone.is_complex() and alone.imag.any()
    for size in (2, 3):
        for found in ranks(size, rank):
            if exact:
                assert torch.equal(found, alone)
            else:
                torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("elements", [3, 600_000])  # large ones are copied past the caches
def test_each_shard_and_each_sum_is_rounded(ranks, elements):
    def step(rank):
        weight = torch.nn.Parameter(torch.zeros(elements))
        shards = Shards(3)
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), compression=Compression.bf16, shards=shards
        )
        for shard in shards:
            (weight * (1.0 + 2.0**-9 + shard)).sum().backward()
        optimizer.step()
        return weight.grad

    leaves = [torch.tensor(1.0 + 2.0**-9 + shard).bfloat16() for shard in range(3)]
    total = ((leaves[0] + leaves[1]) + leaves[2]).float() * (1.0 / 3)
    for gradient in ranks(2, step):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, total.expand(elements))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_gradient_scaler_has_the_same_verdict_on_all_ranks(ranks, size):
    """One infinity in one shard: no rank steps, and all halve their scale; the next step is taken by all, also by a
    spare, which scales no loss.
    """

    def steps(rank):
        model = net(3, 1)
        shards = Shards(4)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shards=shards)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        TorchState(model, optimizer, shards=shards, scaler=scaler)
        found = []
        for bad in (True, False):
            for shard in shards:
                loss = model(torch.full((2, 3), float(shard))).square().mean()
                factor = torch.inf if bad and shard == 2 else 1.0
                scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((scaler.get_scale(), float(norm), model[0].weight.tolist()))
        return found

    (alone,) = ranks(1, steps)
    assert alone[0][0] == 4.0 and alone[0][2] == net(3, 1)[0].weight.tolist()
    assert alone[1][0] == 4.0 and alone[1][2] != alone[0][2]
    for found in ranks(size, steps):
        assert found[1] == alone[1] and found[0][::2] == alone[0][::2]


def test_several_means_are_computed_in_one_call(ranks):
    def step(rank):
        shards = Shards(3)
        held = list(shards)
        return shards.means(loss=[0.1 * each for each in held], right=held)

    wanted = {"loss": (0.0 + 0.1 + 0.2) / 3, "right": 1.0}
    assert ranks(1, step) == [wanted]
    assert ranks(5, step) == [wanted] * 5


@pytest.fixture
def first_is_slow(monkeypatch):
    """Rank 0 needs nine times as long for a shard, and a division follows each step."""
    monkeypatch.setattr(load_balancing, "PERIOD", 1)
    monkeypatch.setattr(load_balancing, "PATIENCE", 1)
    seconds = property(lambda _: 9.0 if lifecycle.current().place.rank == 0 else 1.0)
    monkeypatch.setattr(load_balancing.SpeedWindow, "median_s", seconds)


def committed_shards(**options):
    """Return shards after a step and a commit, from which on a division may change."""
    shards = Shards(8, **options)
    list(shards)
    shards.committed()
    return shards


@pytest.mark.parametrize("fetching", [0, 1])
def test_a_division_waits_while_a_rank_fetches_the_next_step_before_commits(
    ranks, first_is_slow, fetching
):
    def step(rank):
        shards = Shards(8)
        for _ in range(6):
            list(shards)
            fetched = list(shards.held) if rank == fetching else None
            shards.committed()
            assert fetched in (None, list(shards.assigned))
        return len(shards.assigned)

    assert ranks(2, step) == [4, 4]


def test_loader_fetches_a_step_when_yielding_the_step(ranks, first_is_slow):
    def steps(rank, fetches):
        shards = Shards(8)
        loader = DataLoader(list(range(64)), global_batch_size=16, shards=shards)
        for _ in range(2):
            for step in loader:
                list(shards.over(step))
            coming = next(iter(loader)) if fetches else None  # an epoch has ended before the commit
            shards.committed()
            if coming is not None:
                list(shards.over(coming))
        return len(shards.assigned)

    assert ranks(2, lambda rank: steps(rank, False)) == [1, 7]
    assert ranks(2, lambda rank: steps(rank, True)) == [4, 4]


def test_mean_after_a_commit_accepts_numbers_of_either_division(ranks, first_is_slow):
    def step(rank):
        shards = committed_shards()
        before = list(shards)
        assert list(shards.assigned) == before
        assert shards.mean(before) == 3.5
        shards.committed()
        assert len(before) == 4 and len(shards.held) == (1 if rank == 0 else 7)
        return shards.mean(before), shards.mean(shards.held)

    assert ranks(2, step) == [(3.5, 3.5)] * 2


def test_mean_of_numbers_of_two_divisions_is_refused_on_all_ranks(ranks, first_is_slow):
    def step(rank):
        shards = committed_shards()
        before = list(shards)
        shards.committed()
        with pytest.raises(Invalid):
            shards.mean(before if rank == 0 else shards.held)

    ranks(2, step)


def test_numbers_of_shards_stay_even_without_by_speed(ranks, first_is_slow):
    def step(rank):
        shards = committed_shards(by_speed=False)
        before = list(shards)
        shards.committed()
        return before == list(shards.held)

    assert ranks(2, step) == [True, True]


def test_a_division_changes_no_bit(ranks, first_is_slow, monkeypatch):
    (alone,) = ranks(1, lambda rank: train(8))
    divisions = []

    def committed(self, real=Shards.end_step):
        real(self)
        self.committed()
        divisions.append(len(self.held))

    monkeypatch.setattr(Shards, "end_step", committed)
    for found in ranks(3, lambda rank: train(8)):
        assert same(found, alone)
    assert set(divisions) > {1}


def test_without_exactness_the_mean_is_the_same_but_for_rounding(ranks):
    (alone,) = ranks(1, lambda rank: train(7))
    found = ranks(3, lambda rank: train(7, exact=False))
    assert all(same(found[0], each) for each in found)
    assert found[0][0] == pytest.approx(alone[0], rel=1e-4)
    assert not same(found[0], alone)


def test_mean_of_gradients_equals_the_whole_batch(ranks):
    def of_all(rank):
        model = Network()
        shards = Shards(6)
        shards.watch(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shards=shards)
        for shard in shards:
            model(drawn(4, 5, seed=shard), shard).square().mean().backward()
        optimizer.step()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    expected = Network()
    for shard in range(6):
        expected.queue = expected.queue[:0]  # as at the step's beginning
        (expected(drawn(4, 5, seed=shard), shard).square().mean() / 6).backward()
    for found in ranks(4, of_all):
        for parameter, gradient in zip(expected.parameters(), found, strict=True):
            wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            assert torch.allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


class Backwards(torch.nn.Module):
    """Declared in the order in which backward makes gradients, not in that of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 20, bias=False) for _ in range(5))
        set_drawn(self)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for each in reversed(self.layers):
            inputs = torch.tanh(each(inputs))
        return inputs


@pytest.mark.parametrize("count", [2, 6])
def test_all_ranks_adopt_the_order_observed_by_rank_0(ranks, count):
    """From the second step on all buckets but one travel before the last gradient comes; and whatever the buckets are,
    sums have the same bits.
    """

    def steps(fusion_bytes):
        world = lifecycle.current()
        world.env = replace(world.env, fusion_bytes=fusion_bytes)
        model, shards = Backwards(), Shards(count)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shards=shards
        )
        last = create_autospec(StepListener, instance=True)
        shards.listen(last)
        (reducer,) = shards.turn_of(last)
        assert isinstance(reducer, ShardReducer)
        launched = []

        def note(parameter):
            launched.append(reducer.launched)

        for step in range(3):
            for shard in shards:
                if step == 2 and shard == shards.held[-1]:
                    list(model.parameters())[3].register_post_accumulate_grad_hook(note)
                model(drawn(4, 20, seed=10 * step + shard)).square().sum().backward()
            optimizer.step()
        weights = [each.detach().clone() for each in model.parameters()]
        return reducer.order, launched, bool(shards.held), weights

    ((_, _, _, alone),) = ranks(1, lambda rank: steps(None))
    for fusion_bytes, early in ((1, 4), (None, 0)):
        for order, launched, holds, weights in ranks(3, lambda rank, at=fusion_bytes: steps(at)):
            assert order == (0, 1, 2, 3, 4)
            assert launched == ([early] if holds else [])
            assert all(map(torch.equal, alone, weights))


def test_gradients_that_share_memory_are_summed_separately(ranks):
    """Views of both are added up, so backward gives both the same gradient."""

    def step(rank):
        flat, square = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2, 2))
        shards = Shards(5)
        optimizer = DistributedOptimizer(
            torch.optim.SGD([flat, square], lr=0.1), op=Op.SUM, shards=shards
        )
        for _ in shards:
            ((flat.view(2, 2) + square.view(2, 2)) * torch.arange(4.0).view(2, 2)).sum().backward()
        optimizer.step()
        assert flat.grad is not None and square.grad is not None
        return flat.grad.tolist(), square.grad.flatten().tolist()

    assert ranks(1, step) == [([0.0, 5.0, 10.0, 15.0],) * 2]
    assert ranks(3, step) == [([0.0, 5.0, 10.0, 15.0],) * 2] * 3


# ---- planted: each has to be seen by the comparison above ----------------------------------------


def an_ulp_in_one_gradient_of_one_rank(setattr):
    honest = ShardBucket.take

    def take(self, position):
        gradient = self.parameters[position].grad
        if lifecycle.current().place.rank == 1 and gradient is not None and self._last:
            gradient.view(torch.int32)[-1] += 1
        honest(self, position)

    setattr(ShardBucket, "take", take)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        sums_in_the_order_of_ranks,
        a_lost_partial,
        a_stale_buffer,
        an_ulp_in_one_gradient_of_one_rank,
    ],
)
def test_planted_bug_changes_the_result(ranks, monkeypatch, plant):
    (alone,) = ranks(1, lambda rank: train(7))
    plant(monkeypatch.setattr)
    found = ranks(3, lambda rank: train(7))
    assert not all(same(alone, each) for each in found)


# ---- what is refused -----------------------------------------------------------------------------


def made(**options: Any) -> tuple[Any, Shards, Any]:
    model = torch.nn.Linear(3, 1)
    shards = Shards(4)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        **{"shards": shards} | options,
    )
    return model, shards, optimizer


def run_step(model: Any, shards: Shards, within: Any = None) -> None:
    for _ in shards:
        model(torch.ones(2, 3)).sum().backward()
        if within is not None:
            within()


@pytest.mark.parametrize(
    "options",
    [
        {"op": Op.ADASUM},
        {"op": Op.MAX},
        {"compression": NoneCompressor()},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"shards": 8},
    ],
    # An address differs in each process of a run.
    ids=lambda it: " ".join(it) if isinstance(it, dict) else it,
)
def test_options_that_depend_on_the_shard_assignment_are_refused(ranks, options):
    with raises(Invalid):
        ranks(1, lambda rank: made(**options))


def stepping_in_the_loop(model, shards, optimizer):
    run_step(model, shards, optimizer.step)


def clipping_in_the_loop(model, shards, optimizer):
    run_step(model, shards, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def backward_outside(model, shards, optimizer):
    model(torch.ones(2, 3)).sum().backward()


def leaving_the_loop(model, shards, optimizer):
    for _ in shards:
        break
    run_step(model, shards)


def two_passes(model, shards, optimizer):
    run_step(model, shards, lambda: model(torch.ones(2, 3)).sum().backward())


def too_few_batches(model, shards, optimizer):
    list(shards.over(iter([1, 2])))


def commit_within(model, shards, optimizer):
    run_step(model, shards, shards.state_dict)


def host_updates_within(model, shards, optimizer):
    run_step(model, shards, TorchState(model, optimizer, shards=shards).check_host_updates)


def collective_within(model, shards, optimizer):
    run_step(model, shards)
    assert context.refusal() == ""
    run_step(model, shards, lambda: elastic.allreduce(torch.ones(1), name="loss"))


def mean_within(model, shards, optimizer):
    run_step(model, shards, lambda: shards.mean([1.0, 1.0, 1.0, 1.0]))


def too_few_values(model, shards, optimizer):
    shards.mean([1.0])


def single_value(model, shards, optimizer):
    shards.mean(torch.tensor(1.0))


def value_of_each_sample(model, shards, optimizer):
    shards.mean([torch.ones(2)] * 4)


def zero_grad_within(model, shards, optimizer):
    run_step(model, shards, optimizer.zero_grad)


def sparse(model, shards, optimizer):
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer.add_param_group({"params": table.parameters()})
    for _ in shards:
        table(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize(
    "mistake",
    [
        stepping_in_the_loop,
        clipping_in_the_loop,
        backward_outside,
        leaving_the_loop,
        two_passes,
        too_few_batches,
        commit_within,
        host_updates_within,
        collective_within,
        mean_within,
        too_few_values,
        single_value,
        value_of_each_sample,
        zero_grad_within,
        sparse,
    ],
)
def test_mistakes_in_the_shard_loop_are_refused(ranks, mistake):
    with raises(Invalid):
        ranks(1, lambda rank: mistake(*made()))


def test_optimizer_step_inside_the_shard_loop_is_refused():
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    shards = Shards(2)
    for _ in range(2):
        list(shards)
        optimizer.step()
    with raises(Invalid):
        for _ in shards:
            optimizer.step()


def test_ranks_with_different_shards_raise_state_mismatch(ranks):
    def step(rank):
        model = torch.nn.Linear(3, 1)
        shards = Shards(2, seed=rank)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shards=shards)
        run_step(model, shards)
        optimizer.step()

    with raises(StateMismatch):
        ranks(2, step)


def test_fewer_shards_than_the_least_workers_are_refused_before_training(ranks):
    def wrap(rank):
        world = lifecycle.current()
        world.env = replace(world.env, workers_min=5)
        made()

    with raises(Invalid):
        ranks(1, wrap)


@pytest.mark.parametrize("allowed", [False, True])
def test_rank_with_different_arithmetic_is_refused_unless_inexact_is_allowed(
    ranks, monkeypatch, caplog, allowed
):
    monkeypatch.setattr(
        "elastic.exact.arithmetic_probe.lines",
        lambda: [f"arithmetic.threads {1 + lifecycle.current().place.rank}"],
    )

    def step(rank):
        world = lifecycle.current()
        world.env = replace(world.env, allow_inexact=allowed)
        model, shards, optimizer = made()
        run_step(model, shards)
        optimizer.step()
        return shards.inexact_since

    if not allowed:
        with raises(StateMismatch):
            ranks(2, step)
        return
    assert ranks(2, step) == [0, 0]
    recorded("log", caplog.text)


def test_changed_thread_count_during_training_is_refused(ranks, monkeypatch):
    def step(rank):
        model, shards, optimizer = made()
        run_step(model, shards)
        optimizer.step()
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        run_step(model, shards)

    with raises(Invalid):
        ranks(1, step)


def test_sync_batch_norm_is_refused_with_shards():
    with raises(Invalid):
        Shards(2).watch(torch.nn.Sequential(SyncBatchNorm(3)))


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + index


class Streamed(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(()) + index for index in range(16))


def augmented_file(number: int) -> Iterator[torch.Tensor]:
    """Read forward, past the samples of others."""
    return (torch.rand(()) + 4 * number + index for index in range(4))


FILES = ShardedFiles(range(4), augmented_file, [4] * 4)


def loader_of(**options: Any) -> DataLoader:
    return DataLoader(range(16), global_batch_size=8, **options)


def taken(step: Any) -> Any:
    list(step)
    return step


@pytest.mark.parametrize(
    "batches",
    [
        lambda shards: loader_of(shards=shards),
        lambda shards: torch.utils.data.DataLoader(Augmented()),
        lambda shards: iter(torch.utils.data.DataLoader(Augmented())),
        lambda shards: torch.ones(5, 2).unbind(),
        lambda shards: torch.ones(4, 3),
        lambda shards: {"input_ids": torch.ones(4, 3)},
        lambda shards: [torch.ones(4, 3), torch.ones(4).long()],
        lambda shards: next(iter(loader_of(shards=5))),
        lambda shards: next(iter(loader_of(shards=Shards(5)))),
        lambda shards: taken(next(iter(loader_of(shards=shards)))),
        lambda shards: next(iter(loader_of(shards=shards)))[0],
    ],
)
def test_batches_that_are_no_step_of_this_rank_are_refused(ranks, batches):
    """With the number alone a loader deals blocks. In a world of 3 these are the ranks' shards, and in others not."""

    def step(rank):
        shards = Shards(5)
        list(shards.over(batches(shards)))

    with raises(Invalid):
        ranks(3, step)


def test_optimizers_and_schedules_of_shards_must_be_in_one_state_with_the_shards(ranks):
    def states(rank):
        said = []
        model, shards, optimizer = made()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        said.append(refusal_of(lambda: TorchState(model, plain, shards=shards)))
        said.append(refusal_of(lambda: TorchState(model, optimizer)))
        said.append(refusal_of(lambda: TorchState(model, loader=loader_of(shards=shards))))
        said.append(refusal_of(lambda: TorchState(model, optimizer, shards=Shards(4))))
        said.append(refusal_of(lambda: TorchState(torch.nn.Linear(3, 1), optimizer, shards=shards)))
        said.append(refusal_of(lambda: TorchState(model, shards=shards)))
        TorchState(model, optimizer, shards=shards, loader=loader_of(shards=shards))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        said.append(refusal_of(lambda: TorchState(model, optimizer, shards=shards)))
        state = TorchState(model, optimizer, shards=shards, schedule=schedule)
        late = DistributedOptimizer(
            torch.optim.SGD([*model.parameters()][:1], lr=1.0), shards=shards
        )
        said.append(refusal_of(lambda: state.save()))
        late.itself = late  # a scheduler makes such a cycle, too
        del late
        state.save()
        return said

    [said] = ranks(1, states)
    recorded("errors", said)


def test_layout_of_a_sharded_loader_contains_its_batch_size():
    shards = Shards(4)
    said = loader_of(shards=shards).layout()
    assert said != DataLoader(range(16), global_batch_size=4, shards=shards).layout()
    assert "batch 8" in said and "batch_seeds" in said
    assert "batch" not in loader_of(shards=Shards(4, exact=False)).layout()


class AskedForMany(Augmented):
    """As Hugging Face's datasets: torch asks them for a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list((torch.rand(len(indices)) + torch.tensor(indices)).unbind())

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError(f"asked for {index} alone")


@pytest.mark.parametrize("dataset", [Augmented(), AskedForMany()])
@pytest.mark.parametrize("seeds", [None, True])
def test_samples_of_exact_shards_draw_the_same(monkeypatch, dataset, seeds):
    """Whoever loads them, and whatever was drawn in that process before."""

    def load(rank: int, size: int) -> list[tuple[int, list[float]]]:
        place = Place(rank, size, rank, size, 0, 1)
        monkeypatch.setattr(lifecycle, "position", lambda: (place, 1))
        shards = Shards(4)
        loader = DataLoader(dataset, global_batch_size=8, shards=shards, sample_seeds=seeds)
        return [(loader.shard, batch.tolist()) for step in loader for batch in shards.over(step)]

    parts = [each for rank in range(3) for each in load(rank, 3)]
    assert sorted(parts) == sorted(load(0, 1))


def drawn_beside(samples: list[Any]) -> list[float]:
    """A collate_fn that draws."""
    return [*(each.item() for each in samples), torch.rand(1).item(), random.random()]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [Augmented(), Streamed(), FILES], ids=["indexed", "stream", "files"]
)
def test_collate_function_draws_the_same_numbers_on_any_rank_and_worker(
    monkeypatch, dataset, workers
):
    def load(rank: int, size: int, workers: int = 0) -> list[tuple[int, list[float]]]:
        place = Place(rank, size, rank, size, 0, 1)
        monkeypatch.setattr(lifecycle, "position", lambda: (place, 1))
        shards = Shards(4)
        loader = DataLoader(
            dataset,
            global_batch_size=8,
            shards=shards,
            collate_fn=drawn_beside,
            num_workers=workers,
        )
        return [(loader.shard, batch) for step in loader for batch in shards.over(step)]

    parts = [each for rank in range(3) for each in load(rank, 3)]
    assert sorted(parts) == sorted(load(0, 1, workers))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [Augmented(), Streamed(), FILES], ids=["indexed", "stream", "files"]
)
def test_random_numbers_of_a_script_do_not_depend_on_loader_workers(dataset, workers):
    """Within the shards and between two steps."""

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]

    plain, shards = Shards(2), Shards(2)
    list(plain)
    expected = [[draw(), *[draw() for _ in plain]] for _ in range(4)]
    loader = DataLoader(dataset, global_batch_size=4, shards=shards, num_workers=workers)
    list(shards)
    assert [[draw(), *[draw() for _ in shards.over(step)]] for step in loader] == expected


@pytest.mark.parametrize("changed", [{"count": 4}, {"seed": 2}, {"exact": False}], ids=str)
def test_run_cannot_be_resumed_with_different_shards(changed):
    saved = Shards(8, seed=1).state_dict()
    with raises(StateMismatch):
        Shards(**{"count": 8, "seed": 1} | changed).load_state_dict(saved)


@pytest.mark.parametrize("bad", [{"count": 0}, {"count": 2.0}, {"count": 2, "seed": -1}], ids=str)
def test_invalid_numbers_of_shards_are_refused(bad):
    with raises(Invalid):
        Shards(**bad)


# ---- sums of several passes, and of two optimizers -----------------------------------------------


def test_several_backward_passes_of_a_shard_are_accumulated(ranks):
    def step(rank):
        model, shards, _ = made(backward_passes_per_step=2)
        run_step(model, shards, lambda: (2 * model(torch.ones(2, 3)).sum()).backward())
        return model.weight.grad.clone()

    for gradient in ranks(3, step):
        assert torch.equal(gradient, torch.full((1, 3), 6.0))


def test_two_optimizers_reduce_in_one_order(ranks):
    def step(rank):
        first, shards, one = made()
        second, _, two = made(shards=shards)
        with torch.no_grad():
            for each in (*first.parameters(), *second.parameters()):
                each.fill_(0.5)
        for _ in range(3):
            for shard in shards:  # the second one's gradients come first
                (second(first(torch.ones(2, 3)).expand(2, 3)).sum() * (shard + 1)).backward()
            one.step()
            two.step()
        return [first.weight.grad.clone(), second.weight.grad.clone()]

    first, *others = ranks(3, step)
    assert all(all(map(torch.equal, first, each)) for each in others)
