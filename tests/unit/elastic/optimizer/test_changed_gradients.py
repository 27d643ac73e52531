"""A script that changes gradients before their reduction is over is told so, and no other is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer
from harness.golden import raises
from harness.small_worlds import MirroredGroup, backward, net, sgd, small, train_once

WIDE = 9000  # elements of a gradient that is filled in by itself


class Keeping:
    """A user's compression that keeps for the next step what it rounds away, in the gradient itself."""

    @staticmethod
    def compress(tensor):
        return tensor.add_(0.0), None

    @staticmethod
    def decompress(tensor, context):
        return tensor


COMPRESSIONS = [Compression.none, Compression.fp16, Keeping]


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def replace(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2


def halve_the_last(model: torch.nn.Module) -> None:
    *_, last = model.parameters()
    assert last.grad is not None
    last.grad.mul_(0.5)


def zero_in_place(model: torch.nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def of_both(model, other, **options) -> Any:
    """An optimizer whose steps have two backward passes."""
    both = [*model.parameters(), *other.parameters()]
    return DistributedOptimizer(torch.optim.SGD(both, lr=0.1), **options)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("change", [clip, replace, halve_the_last, zero_in_place])
@pytest.mark.parametrize("widths", [(3, 2), (1, WIDE, 1)], ids=["small", "large"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_change_between_backward_and_step_is_refused(
    world, compression, change, widths, set_to_none
):
    model, other = net(*widths), net(*widths)
    optimizer = of_both(model, other, compression=compression)
    for _ in range(2):
        optimizer.zero_grad(set_to_none)
        backward(model)
        backward(other)
        optimizer.step()
    for _ in range(2):
        optimizer.zero_grad(set_to_none)
        backward(model)  # a second pass may follow
        change(model)
        with raises(Invalid):
            optimizer.step()
        optimizer.zero_grad(set_to_none)
        backward(model)
        backward(other)
        optimizer.step()  # who repairs it goes on


def test_the_refusal_names_a_gradient_and_leaves_no_rank_waiting(threads):
    def train(rank):
        model, other = net(3, 2), net(3, 2)
        optimizer = of_both(model, other)
        for step in range(4):
            optimizer.zero_grad()
            backward(model)
            changes = rank == 0 and step == 2
            if changes:
                halve_the_last(model)
            else:
                backward(other)
            with (
                pytest.raises(Invalid, match=r"gradient of allreduce.noname.0.1 was")
                if changes
                else (contextlib.nullcontext())
            ):
                optimizer.step()
        return model[0].bias.grad.tolist()

    assert threads(2, train) == [[1.0, 1.0]] * 2


def test_hook_after_the_reduction_hook_is_refused(world):
    model, optimizer = small(1, WIDE, 1)
    train_once(model, optimizer)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    optimizer.zero_grad()
    with raises(Invalid):
        backward(model)


# ---- no change -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_reduction_is_not_reported_as_a_change(world, compression, op, inside, set_to_none):
    world.become(2, group=MirroredGroup(2, scales_inside=inside))
    for widths in ((3, 2), (1, WIDE, 1)):
        model, optimizer = small(*widths, lr=0.0, op=op, compression=compression)
        for _ in range(4):
            optimizer.zero_grad(set_to_none)
            train_once(model, optimizer)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_writes_of_other_ranks_are_not_reported_as_a_change(threads, compression):
    def train(rank):
        model, optimizer = small(1, WIDE, 2, lr=0.0, compression=compression)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            train_once(model, optimizer)
        return model[-1].bias.grad.tolist()

    assert threads(3, train) == [[1.0, 1.0]] * 3


def test_accumulation_over_passes_is_not_reported_as_a_change(world):
    model, optimizer = small(3, WIDE, 2, lr=0.0, backward_passes_per_step=2)
    for set_to_none in (False, True, False):
        optimizer.zero_grad(set_to_none)
        loss = model(torch.ones(1, 3)).sum()
        loss.backward(retain_graph=True)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)  # between passes nothing travels
        loss.backward()
        optimizer.step()
    assert model[-1].bias.grad.tolist() == [1.5, 1.5]


def test_hook_before_the_reduction_hook_is_not_reported_as_a_change(world):
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model = net(3, 2)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(halve)
    optimizer = sgd(model, lr=0.0)
    for set_to_none in (False, True, False):
        optimizer.zero_grad(set_to_none)
        train_once(model, optimizer)
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


def test_cleared_gradients_are_not_reported_as_a_change(world, monkeypatch):
    monkeypatch.setattr(gradient_reducer, "FIRST_BYTES", 0)
    monkeypatch.setattr(gradient_reducer, "FULL_BYTES", 0)
    model, other = net(1, WIDE, 2), net(3, 2)
    optimizer = of_both(model, other)
    for passes in (2, 1, 1):
        optimizer.zero_grad()
        backward(model)
        if passes == 2:
            backward(other)
        else:
            model.zero_grad()
        optimizer.step()
    assert model[-1].bias.grad.tolist() == [1.0, 1.0]


def test_gradients_assigned_without_backward_are_not_reported_as_a_change(world):
    model, optimizer = small(3, 2, lr=0.0)
    for value in (1.0, 2.0, 3.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
            parameter.grad.mul_(2.0)
        optimizer.step()
        assert model[0].bias.grad.tolist() == [2 * value] * 2


def test_accumulated_sparse_gradients_are_not_reported_as_a_change(world):
    table: Any = torch.nn.Embedding(10, 2, sparse=True)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), sparse_as_dense=True
    )
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def test_gradient_scaler_is_not_reported_as_a_change(world):
    model, optimizer = small(1, WIDE, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_abandoned_step_does_not_affect_the_next(world):
    model, optimizer = small(3, 2, lr=0.0)
    train_once(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    held = [parameter.grad for parameter in model.parameters()]
    optimizer._reset_passes()
    for parameter, gradient in zip(model.parameters(), held, strict=True):
        parameter.grad = gradient.fill_(4.0)
    optimizer.step()
    assert model[0].bias.grad.tolist() == [4.0, 4.0]
