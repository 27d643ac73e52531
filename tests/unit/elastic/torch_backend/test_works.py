"""Works of torch.distributed and their futures: the result of a collective belongs to the world of its start."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import create_autospec

import pytest
import torch

from elastic.collectives.interface import StreamOrdered, Work
from elastic.errors import CollectiveFailed
from elastic.torch_backend.collective_calls import CollectiveCall
from elastic.torch_backend.works import ElasticWork, Futures, WorkOwner, joined, late
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


def test_backward_pass_raises_the_failure_of_its_collectives():
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


def test_reported_failure_has_the_generation_of_its_world():
    group = Group()
    work = group.work(fails=True)
    group.owner.generation.return_value = 2
    assert work.is_completed()
    ((error, generation), _) = group.owner.broke.call_args
    assert isinstance(error, CollectiveFailed)
    assert generation == 1


def test_callback_of_a_future_may_wait_for_the_future_and_its_work():
    """As in comm hooks: ``future.then(lambda future: future.wait()[0] / size)``."""
    work = Group().work()
    future = work.get_future()
    found = []
    then = future.then(lambda done: found.extend([done.wait(), work.wait()]))
    work.wait()
    assert then.done()
    assert found == [[], True]


def test_profile_contains_the_wait_for_a_collective():
    with torch.profiler.profile() as profile:
        Group().work().wait()
    assert "elastic:all_reduce wait" in [event.name for event in profile.events()]


@pytest.mark.parametrize("missing", [[], [3], [1, 2], list(range(1, 12))])
def test_timeout_message_contains_the_missing_ranks(missing: list[int]):
    recorded("messages", late(missing))


# ---- streams that wait in place of the host ------------------------------------------------------------------------


class WorkOnStream(Work, StreamOrdered):
    """A collective that a stream can wait for."""


@pytest.fixture
def default_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def on_stream(results, *, later=True, settles=True):
    """Return a work and its collective."""
    group = Group()
    group.owner.settles.return_value = settles
    collective = create_autospec(WorkOnStream, instance=True)
    collective.done.return_value = True
    begun = CollectiveCall()
    begun.works.append(collective)
    work = ElasticWork(group.owner, "call", begun, results, 7.0, group.futures, read_later=later)
    return work, collective


def test_training_stream_waits_for_floats_that_are_read_later(default_stream):
    work, collective = on_stream([torch.ones(2), torch.ones(2, dtype=torch.complex64)])
    assert work.wait()
    collective.follow.assert_called_once_with(7.0)
    assert not collective.wait.called and not collective.within.called


@pytest.mark.parametrize(
    ("results", "later", "settles", "timeout"),
    [
        pytest.param([torch.ones(2, dtype=torch.int64)], True, True, 0, id="may be indices"),
        pytest.param([], True, True, 0, id="a barrier"),
        pytest.param([torch.ones(2)], False, True, 0, id="read at once"),
        pytest.param([torch.ones(2)], True, False, 0, id="nothing settles it"),
        pytest.param([torch.ones(2)], True, True, 5, id="a timeout of its own"),
    ],
)
def test_host_waits_on_the_default_stream_if_an_invalid_value_could_do_harm(
    default_stream, results, later, settles, timeout
):
    work, collective = on_stream(results, later=later, settles=settles)
    assert work.wait(timedelta(seconds=timeout))
    assert collective.wait.called and not collective.follow.called


def test_coalesced_works_are_followed_together(default_stream):
    pairs = [on_stream([torch.ones(2)]) for _ in range(2)]
    owner = pairs[0][0]._owner
    together = joined(owner, "coalesced", [work for work, _ in pairs], Futures(owner))
    assert together.wait()
    for work, collective in pairs:
        assert collective.follow.called and not collective.wait.called
        assert work.over
