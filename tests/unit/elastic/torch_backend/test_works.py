"""Works of torch.distributed and their futures: the result of a collective belongs to the world of its start."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import create_autospec

import pytest
import torch

from elastic.collectives.interface import Work
from elastic.errors import CollectiveFailed
from elastic.torch_backend.collective_calls import CollectiveCall
from elastic.torch_backend.works import ElasticWork, Futures, WorkOwner, late
from harness.golden import recorded


class Group:
    """A process group whose collectives all fail, or all succeed."""

    def __init__(self) -> None:
        self.owner = create_autospec(WorkOwner, instance=True)
        self.owner.guard.side_effect = lambda name: nullcontext()
        self.owner.generation.return_value = 1
        self.futures = Futures(self.owner)

    def work(self, *, fails: bool = False) -> ElasticWork:
        collective = create_autospec(Work, instance=True)
        collective.done.return_value = True
        if fails:
            collective.wait.side_effect = CollectiveFailed("aborted")
        begun = CollectiveCall()
        begun.works.append(collective)
        return ElasticWork(self.owner, "all_reduce", begun, [], None, self.futures)


class Reduces(torch.autograd.Function):
    """Starts a collective in the backward pass, like DDP's buckets."""

    @staticmethod
    def forward(ctx, tensor, group, fails):
        ctx.group, ctx.fails = group, fails
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.group.work(fails=ctx.fails).get_future()
        return gradient, None, None


def backward(group: Group, *, fails: bool) -> None:
    tensor = torch.ones(2, requires_grad=True)
    Reduces.apply(tensor, group, fails).sum().backward()


def test_a_backward_pass_raises_what_became_of_its_collectives():
    group = Group()
    backward(group, fails=False)
    with pytest.raises(CollectiveFailed):
        backward(group, fails=True)


def test_a_failure_of_an_older_world_is_not_raised_in_the_next():
    group = Group()
    old = [group.work(fails=True) for _ in range(2)]
    for work in old:
        work.get_future()
        assert work.is_completed() and not work.is_success()
    group.owner.generation.return_value = 2
    backward(group, fails=False)


def test_a_reported_failure_names_its_world():
    group = Group()
    work = group.work(fails=True)
    group.owner.generation.return_value = 2
    assert work.is_completed()
    ((error, generation), _) = group.owner.broke.call_args
    assert isinstance(error, CollectiveFailed)
    assert generation == 1


def test_what_a_future_calls_may_wait_for_it_and_for_its_work():
    """As in comm hooks: ``future.then(lambda future: future.wait()[0] / size)``."""
    work = Group().work()
    future = work.get_future()
    found = []
    then = future.then(lambda done: found.extend([done.wait(), work.wait()]))
    work.wait()
    assert then.done()
    assert found == [[], True]


def test_a_profile_shows_what_was_waited_for():
    with torch.profiler.profile() as profile:
        Group().work().wait()
    assert "elastic:all_reduce wait" in [event.name for event in profile.events()]


@pytest.mark.parametrize("missing", [[], [3], [1, 2], list(range(1, 12))])
def test_missing_ranks_are_named(missing: list[int]):
    recorded("messages", late(missing))
