"""What a script or a trainer does to gradients between backward() and step() is done to the reduced ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from elastic.errors import PeerLost
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients.step_progress import StepPhase
from harness.golden import raises
from harness.small_worlds import backward, net, sgd, small, train_once

RANKS = 2


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 3, generator=generator) * (rank * 3 + 1)


def clip_norm(model: torch.nn.Module, _: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_value(model: torch.nn.Module, _: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)


def times_one(model: torch.nn.Module, _: Any) -> None:
    """As a trainer does that only logs the norm."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def squash(model: torch.nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.tanh_()


def squash_unseen(model: torch.nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.tanh_()


def replace(model: torch.nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.tanh()


def clip_as_horovod_documents_it(model: torch.nn.Module, optimizer: Any) -> None:
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    clip_norm(model, optimizer)


CHANGES = [clip_norm, clip_value, times_one, squash, squash_unseen, replace]


def trained(
    rank: int | None, change: Any, *, passes: int = 1, run: Any = None, **options: Any
) -> list[torch.Tensor]:
    """The weights after three steps of one rank, or for None of a process with the batches of all of them."""
    model = net(3, 4, 2)
    plain: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = plain
    if rank is not None:
        optimizer = DistributedOptimizer(plain, backward_passes_per_step=passes, **options)
    forward = model if run is None else run(model)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(step * passes, (step + 1) * passes):
            rows = (
                torch.cat([batch(each, number) for each in range(RANKS)])
                if rank is None
                else batch(rank, number)
            )
            forward(rows).square().mean().backward()
        change(model, optimizer)
        if change is clip_as_horovod_documents_it and rank is not None:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def as_one_process(threads: Any, change: Any, **options: Any) -> None:
    first, second = threads(RANKS, lambda rank: trained(rank, change, **options))
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, trained(None, change, **options))


@pytest.mark.parametrize("change", [*CHANGES, clip_as_horovod_documents_it])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradient_changes_after_backward_equal_one_process(threads, change, passes):
    """From the first step on."""
    as_one_process(threads, change, passes=passes)


def with_checkpoints(use_reentrant: bool) -> Any:
    def wrap(model: Any) -> Any:
        def forward(rows: torch.Tensor) -> Any:
            rows = rows.requires_grad_()
            return model[1](checkpoint(model[0], rows, use_reentrant=use_reentrant))

        return forward

    return wrap


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_models_train_as_in_one_process(threads, use_reentrant, passes):
    as_one_process(threads, clip_norm, run=with_checkpoints(use_reentrant), passes=passes)


@pytest.mark.slow
def test_compiled_models_are_clipped_like_plain_ones(world):
    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="aot_eager")

    ours, theirs = trained(0, clip_norm, run=compiled), trained(0, clip_norm)
    torch.testing.assert_close(ours, theirs)


def test_several_optimizers_of_one_pass_train_equally_on_all_ranks(threads):
    def train(rank):
        model = net(3, 4, 2)
        parts = list(model) if rank else list(reversed(model))
        optimizers = {part: sgd(part) for part in model}
        for step in range(3):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            for part in parts:  # it does not matter who comes first: nothing is left to reduce
                torch.nn.utils.clip_grad_norm_(part.parameters(), 0.1)
                optimizers[part].step()
        return [value.tolist() for value in model.parameters()]

    first, second = threads(2, train)
    assert first == second


def test_closure_that_clips_gradients_gives_equal_parameters(threads):
    """As a trainer's that hands all of a step to the optimizer."""

    def train(rank):
        model, optimizer = small(3, 2)
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(batch(rank, step)).square().mean()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return float(norm)

            norm = optimizer.step(closure)
        return norm, [value.tolist() for value in model.parameters()]

    first, second = threads(2, train)
    assert first == second


# ---- gradients that are missing ------------------------------------------------------------------


def test_parameters_that_differ_by_rank_are_clipped_equally(threads):
    """Which ones are used changes with every step. The first step clips each rank's own gradients, and says nothing."""

    def train(rank):
        layers: Any = torch.nn.ModuleList([net(3, 2) for _ in range(3)])
        optimizer = sgd(layers)
        for step in range(5):
            optimizer.zero_grad()
            layers[(rank + step) % 3](batch(rank, step)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
            optimizer.step()
        return float(norm), [value.tolist() for value in layers.parameters()]

    first, second = threads(2, train)
    assert first == second


def test_rank_with_all_gradients_does_not_wait_for_an_incomplete_one(threads):
    """In the first step, where it can't be known whether another pass follows, both leave it to step()."""

    def train(rank):
        model, other = net(3, 2), net(3, 2)
        both: Any = torch.nn.ModuleList([model, other])
        optimizer = sgd(both)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            losses = [model(batch(rank, step)).sum()]
            losses += [other(batch(rank, step)).sum()] if rank else []
            torch.stack(losses).sum().backward()
            seen.append(optimizer._reducer._progress.phase is StepPhase.REDUCED)
            clip_norm(both, optimizer)
            optimizer.step()
        return seen, [value.tolist() for value in both.parameters()]

    first, second = threads(2, train)
    assert first == second
    assert first[0] == [False, True]


def test_losses_with_separate_parameters_may_have_one_pass_each(threads):
    def train(rank):
        model, other = net(3, 2), net(3, 2)
        both: Any = torch.nn.ModuleList([model, other])
        optimizer = sgd(both)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            other(batch(rank, step)).square().mean().backward()
            clip_norm(both, optimizer)
            optimizer.step()
        return [value.tolist() for value in both.parameters()]

    first, second = threads(2, train)
    assert first == second


def test_unexpected_second_pass_is_refused_until_backward_passes_per_step_is_set(world):
    both: Any = torch.nn.ModuleList([net(3, 2), net(3, 2)])
    optimizer = sgd(both)
    for _ in range(2):
        optimizer.zero_grad()
        backward(both[0])
        optimizer.step()
    optimizer.zero_grad()
    backward(both[0])
    with raises(AssertionError):
        backward(both[1])
    optimizer._reset_passes()
    optimizer.set_backward_passes_per_step(2)
    for passes in (1, 2, 1):
        optimizer.zero_grad()
        for model in both[:passes]:
            backward(model)
        optimizer.step()


@pytest.mark.parametrize("twins", [False, True])
def test_passes_of_several_optimizers_may_run_in_different_orders(threads, twins):
    def train(rank):
        models = [net(3, 2), net(3, 2 if twins else 4)]
        optimizers = [sgd(model) for model in models]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for model in models if rank else reversed(models):
                model(batch(rank, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return [value.tolist() for model in models for value in model.parameters()]

    first, second = threads(2, train)
    assert first == second


# ---- when the world breaks -----------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_lost_peer_is_raised_by_backward(world, use_reentrant):
    model, optimizer = small(3, 4, 2)
    forward = model if use_reentrant is None else with_checkpoints(use_reentrant)(model)
    forward(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def lose(_: torch.Tensor) -> None:
        if optimizer._reducer._launched:
            world.gradients.failure = "rank 1 is gone"

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lose)
    with raises(PeerLost):
        forward(torch.ones(1, 3)).sum().backward()
    assert world.broken
    optimizer._reset_passes()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_was_reduced_can_be_abandoned(world):
    model: Any = net(3, 2)
    optimizer = sgd(model, lr=0.0)
    for _ in range(2):
        backward(model)
        assert optimizer._reducer._progress.phase is StepPhase.REDUCED
        optimizer._reset_passes()
        assert [each.grad for each in model.parameters()] == [None, None]
        train_once(model, optimizer)
        assert model[0].bias.grad.tolist() == [1.0, 1.0]
        optimizer.zero_grad()


def seen_after_backward(threads: Any, change: Any, steps: int = 6) -> list[list[list[float]]]:
    """What each rank sees of its gradients after each backward pass. One parameter is never used."""

    def train(rank: int) -> list[list[float]]:
        model, unused = net(3, 2, 2), torch.nn.Parameter(torch.ones(2))
        named = [*model.named_parameters(), ("unused", unused)]
        parameters = [each for _, each in named]
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(parameters, lr=1e-6), named)
        seen = []
        for number in range(steps):
            change(model, rank, number)
            optimizer.zero_grad()
            model(batch(rank, number)).square().sum().backward()
            live = [each.grad for each in model.parameters() if each.grad is not None]
            seen.append([float(each.sum()) for each in live])
            optimizer.step()
        return seen

    found: list[list[list[float]]] = threads(RANKS, train)
    return found


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_freezing_and_thawing_does_not_change_when_gradients_are_reduced(threads, who):
    def freeze(model: Any, rank: int, number: int) -> None:
        if rank in who:
            model[0].requires_grad_(number not in (2, 3))

    first, second = seen_after_backward(threads, freeze)
    assert first[1:] == second[1:]  # in the first step nobody knows which pass is the last


def test_the_step_in_which_parameters_grow_is_reduced_when_its_pass_ends(threads):
    def grow(model: Any, rank: int, number: int) -> None:
        if number == 2:
            for parameter in model[-1].parameters():
                parameter.data = torch.cat([parameter.data, parameter.data])

    first, second = seen_after_backward(threads, grow)
    assert first[1:] == second[1:]
