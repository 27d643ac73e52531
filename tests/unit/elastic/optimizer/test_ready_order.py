"""Buckets follow the order in which gradients became ready in one rank's first step, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.optimizer import join
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer, plan_agreement
from elastic.runtime import lifecycle
from harness.small_worlds import AllJoin

NAMES = "abcd"


@pytest.fixture(autouse=True)
def one_bucket_each(monkeypatch):
    monkeypatch.setattr(gradient_reducer, "FIRST_BYTES", 0)
    monkeypatch.setattr(gradient_reducer, "FULL_BYTES", 0)


class Chain:
    """Parameters a, b, c and d, and an optimizer. ``learn`` says in which order their gradients become ready."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {name: torch.nn.Parameter(torch.ones(1)) for name in NAMES}
        plain = torch.optim.SGD(self.of.values(), lr=0.0)
        self.optimizer: Any = DistributedOptimizer(plain, [*self.of.items()])

    def backward(self, order: str) -> None:
        value = torch.ones(1)
        for name in reversed(order):
            value = value * self.of[name]
        value.backward()

    def learn(self, order: str) -> str:
        self.optimizer.zero_grad()
        self.backward(order)
        self.optimizer.step()
        return self.buckets

    @property
    def buckets(self) -> str:
        """Whose gradients travel, in order."""
        name_of = {id(parameter): name for name, parameter in self.of.items()}
        built = self.optimizer._reducer._plan.buckets
        return "".join(name_of[id(each)] for bucket in built for each in bucket.parameters)


def test_buckets_follow_the_order_of_use(world):
    chain = Chain()
    assert chain.learn("bdac") == "bdac"
    del world.gradients.calls[:]
    chain.optimizer.zero_grad()
    launched: list[int] = []
    for parameter in chain.of.values():
        parameter.register_post_accumulate_grad_hook(
            lambda _: launched.append(len(world.gradients.calls))
        )
    chain.backward("bdac")
    assert launched == [1, 2, 3, 4]  # none waits for another
    chain.optimizer.step()


def test_gradients_missing_in_the_first_step_are_ordered_last_as_declared(world):
    assert Chain().learn("cb") == "cbad"


def test_declared_order_is_reversed_without_any_gradient(world):
    chain = Chain()
    chain.optimizer.step()
    assert chain.buckets == "dcba"
    assert chain.learn("bdac") == "dcba"  # the plan is agreed, and stays


def test_all_ranks_use_the_order_of_the_lowest_rank(threads):
    orders = ["bdac", "abcd", "dc"]

    def train(rank):
        chain = Chain()
        for _ in range(2):
            chain.learn(orders[rank])
        return chain.buckets, chain.of["a"].grad.tolist()

    assert threads(3, train) == [("bdac", pytest.approx([2 / 3]))] * 3


def test_order_of_the_last_accumulation_pass_is_used(world):
    chain = Chain()
    chain.optimizer.set_backward_passes_per_step(2)
    chain.backward("abcd")
    chain.backward("bdac")
    chain.optimizer.step()
    assert chain.buckets == "bdac"


def test_order_is_observed_again_for_another_set_of_parameters(world):
    chain = Chain()
    chain.learn("bdac")
    chain.of["d"].requires_grad_(False)
    assert chain.learn("cab") == "cab"


def test_world_change_keeps_bucket_order_and_buffers(world):
    chain = Chain()
    chain.learn("bdac")
    built = chain.optimizer._reducer._plan.buckets
    world.become(3)
    assert chain.learn("abcd") == "bdac"
    assert chain.optimizer._reducer._plan.buckets is built


def test_joining_ranks_adopt_the_order_of_the_lowest_rank_and_survivors_rebuild_no_bucket(threads):
    def train(rank):
        world: Any = lifecycle.current()
        meeting, chain, built = world.gradients, Chain(), None
        if rank < 2:
            world.become(2, rank, meeting)
            assert chain.learn("bdac" if rank == 0 else "abcd") == "bdac"
            built = chain.optimizer._reducer._plan.buckets
        world.become(3, rank, meeting)
        assert chain.learn("dcab") == "bdac"
        return built is None or chain.optimizer._reducer._plan.buckets is built

    assert threads(3, train) == [True] * 3


def test_all_ranks_rebuild_their_buckets_when_a_joining_rank_is_the_lowest(threads):
    def train(rank):
        world: Any = lifecycle.current()
        meeting, chain = world.gradients, Chain()
        if rank > 0:
            world.become(2, rank - 1, meeting)
            chain.learn("bdac")
        world.become(3, rank, meeting)
        return chain.learn("dcab")

    assert threads(3, train) == ["dcab"] * 3


def test_rejoining_rank_adopts_the_order_agreed_during_its_absence(threads, monkeypatch):
    monkeypatch.setattr(join, "FORMING_S", 0.0)
    monkeypatch.setattr(join, "submission", AllJoin(3))

    def train(rank):
        chain = Chain()
        if rank > 0:
            for _ in range(2):
                chain.learn("bdac")
        join.join()
        chain.learn("abcd")
        (agreed,) = plan_agreement.of(lifecycle.current(), None).agreed
        assert agreed.layout.order == (1, 3, 0, 2)
        return chain.learn("abcd"), chain.of["a"].grad.tolist()

    assert threads(3, train) == [("bdac", [1.0])] * 3
