"""Ranks that run out of data before others, over real groups: `join`, with gradients and named collectives at once."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import elastic
from elastic.api.compression import Compression
from elastic.errors import CollectiveFailed, PeerLost
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer
from elastic.runtime import lifecycle
from harness.ranks import fixture
from harness.waiting import wait_until

SIZE = 3


def enter(rank: int, size: int, address: Any) -> None:
    from harness.scripts import light  # noqa: F401

    lifecycle.init_static(rank, size, address)
    elastic.init(process_sets="dynamic")


ranks = fixture(SIZE, enter=enter)


# ---- in the ranks ------------------------------------------------------------------------------------------------


def linear(width: int) -> Any:
    torch.manual_seed(width)
    return torch.nn.Sequential(torch.nn.Linear(width, 60), torch.nn.Linear(60, 2))


def distributed(model: Any, lr: float = 0.1, **options: Any) -> Any:
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), **options)


def step(model: Any, optimizer: Any, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(1, model[0].in_features)).sum() * scale).backward()
    optimizer.step()


def scaled_by(scale: float, width: int) -> list[torch.Tensor]:
    """The gradients of one step alone."""
    model = linear(width)
    (model(torch.ones(1, width)).sum() * scale).backward()
    return [parameter.grad for parameter in model.parameters()]


def is_scaled_by(scale: float, model: Any, tolerance: float = 1e-5) -> None:
    expected = scaled_by(scale, model[0].in_features)
    found = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def three_epochs(rank: int, size: int) -> list[int]:
    """Rank r has another number of batches in each; a named allreduce travels between the steps."""
    gradient_reducer.FIRST_BYTES, gradient_reducer.FULL_BYTES = 4096, 16384  # several buckets
    model = linear(50)
    optimizer = distributed(model, lr=0.0, compression=Compression.fp16)
    last = []
    for epoch in range(3):
        batches = [2 + (r + epoch) % size * 2 for r in range(size)]
        for batch in range(batches[rank]):
            there = sum(batch < count for count in batches)
            step(model, optimizer, scale=3.0)
            is_scaled_by(3.0 * there / size, model, 1e-2)
            loss = elastic.allreduce(torch.ones(2), name="loss", op=elastic.Sum)
            assert loss.tolist() == [there, there]
        last.append(elastic.join())
        assert last[-1] == max(range(size), key=batches.__getitem__)
    return last


def test_join_returns_each_rank_once_as_the_last(ranks):
    assert ranks.run(three_epochs) == [[2, 1, 0]] * SIZE


def without_any_data(rank: int, size: int) -> None:
    """The others form their groups, agree on two optimizers and on sparse gradients while this one has joined."""
    model, table = linear(20), torch.nn.Embedding(50, 4, sparse=True)
    both = distributed(model, lr=0.0), distributed(table, lr=0.0)
    words = torch.tensor([7, 9])
    if rank:
        for _ in range(10):
            elastic.allreduce(torch.ones(1), name="first")
        for _ in range(2):
            both[1].zero_grad()
            table(words).sum().backward()
            both[1].step()
            step(model, both[0])
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        assert table.weight.grad.to_dense()[7, 0] == pytest.approx(2 / 3)
        is_scaled_by(2 / 3, model)
    elastic.join()
    assert rank or model[0].weight.grad is None
    step(model, both[0])
    is_scaled_by(1.0, model)


def test_rank_without_data_participates_in_all_collectives_of_its_peers(ranks):
    ranks.run(without_any_data)


def within_a_set(rank: int, size: int) -> None:
    pair = elastic.add_process_set([0, 2])
    model, world_model = linear(10), linear(11)
    optimizer = distributed(model, lr=0.0, process_set=pair)
    both = distributed(world_model, lr=0.0)
    if rank != 2:
        if rank == 1:
            for parameter in model.parameters():
                assert not parameter._post_accumulate_grad_hooks
        for _ in range(2):
            step(model, optimizer, scale=1.0 + rank)
            step(world_model, both)
        # Rank 2 joined without any: it adds zeros to the pair, and rank 1 is on its own.
        is_scaled_by(0.5 if rank == 0 else 2.0, model)
        is_scaled_by(2 / 3, world_model)
    elastic.join()
    step(model, optimizer, scale=1.0 + rank)
    is_scaled_by(2.0, model)


def test_gradients_are_reduced_within_a_process_set(ranks):
    ranks.run(within_a_set)


def groups_at_once(rank: int, size: int) -> None:
    """Rank 0's training thread forms one group, and waits for rank 1, whose engine forms another, and waits for 0."""
    pair = elastic.add_process_set([0, 1])
    model = linear(30)
    optimizer = distributed(model, lr=0.0, process_set=pair)
    store = lifecycle.current().session.groups.store
    assert store is not None
    if rank == 0:
        handle = elastic.allreduce_async(torch.ones(2), name="at once", process_set=pair)
        step(model, optimizer)
        assert elastic.synchronize(handle).tolist() == [1.0, 1.0]
    elif rank == 1:
        forming = "gradients of 0,1"
        wait_until(lambda: any(key.startswith(forming) for key in store.awaited()), forming, 10.0)
        handle = elastic.allreduce_async(torch.ones(2), name="at once", process_set=pair)
        wait_until(lambda: elastic.poll(handle), "its end", 10.0)
        step(model, optimizer)
    if rank < 2:
        is_scaled_by(1.0, model)


def test_groups_that_are_formed_at_the_same_time_do_not_wait_for_each_other(ranks):
    ranks.run(groups_at_once)


def lost(rank: int, size: int) -> tuple[str, float]:
    model = linear(20)
    optimizer = distributed(model)
    step(model, optimizer)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        elastic.join()
    except (PeerLost, CollectiveFailed) as error:
        return type(error).__name__, time.monotonic() - began
    return "nothing", time.monotonic() - began


def test_a_lost_rank_ends_the_wait(ranks):
    """Last, because it breaks the world."""
    ranks.start(lost)
    for rank in range(2):
        raised, seconds = ranks.result(rank)
        assert raised in ("PeerLost", "CollectiveFailed")
        assert seconds < 5.0
