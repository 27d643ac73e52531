"""What is compared of optimizers before a newcomer is let in, and what a newcomer takes over instead."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.driver.membership.worlds import layout_diff
from elastic.negotiation.process_sets import ProcessSet
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer, reduction_description
from elastic.runtime import lifecycle
from elastic.state import ObjectState, TorchState
from harness.fakes import collectives as fake
from harness.golden import recorded
from harness.groups import at_once
from harness.small_worlds import World, net, sgd


@pytest.fixture(autouse=True)
def world(monkeypatch):
    # Without those of other tests.
    monkeypatch.setattr(gradient_reducer, "_reducers", weakref.WeakSet())
    world = World(2)
    monkeypatch.setattr(lifecycle, "current", lambda: world)
    return world


def state_of(reverse: bool = False, channels_last: bool = False, **options: Any) -> TorchState:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 2), torch.nn.Conv2d(2, 2, 2))
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = [*model.parameters()][:: -1 if reverse else 1]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    wrapped = DistributedOptimizer(optimizer, model.named_parameters(), **options)
    return TorchState(model=model, optimizer=wrapped)


@pytest.mark.parametrize(
    "other",
    [
        {"compression": Compression.fp16},
        {"op": Op.SUM},
        {"gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 2},
        {"sparse_as_dense": True},
        {"groups": 2},
        {"reverse": True},
        {"channels_last": True},
    ],
)
def test_difference_of_layouts_names_the_first_different_option(other):
    said = layout_diff.difference(state_of(**other).layout(), state_of().layout())
    recorded("log", said.splitlines()[0])


def test_layouts_do_not_depend_on_frozen_parameters_and_passes():
    one, two = state_of(), state_of()
    one.model[0].requires_grad_(False)
    one.optimizer.set_backward_passes_per_step(3)
    assert one.layout() == two.layout()


def test_layout_does_not_depend_on_the_ranks_of_a_process_set(monkeypatch):
    monkeypatch.setattr(ProcessSet, "included", lambda self: False)
    optimizers = [sgd(net(2, 1), process_set=ProcessSet([rank])) for rank in (0, 1)]
    one, two = [TorchState(optimizer=each).layout() for each in optimizers]
    assert one == two != TorchState(optimizer=sgd(net(2, 1))).layout()


def test_optimizer_outside_of_the_state_is_compared():
    model = net(2, 1)
    state = TorchState(model=model)
    assert reduction_description.outside_state(state.handled()) == ""
    optimizer = sgd(model)
    before = reduction_description.outside_state(state.handled())
    assert "DistributedOptimizer.compression none" in before.splitlines()
    del optimizer
    other = sgd(model, compression=Compression.fp16)
    said = layout_diff.difference(reduction_description.outside_state(state.handled()), before)
    recorded("log", said)
    assert reduction_description.outside_state(ObjectState().handled()) != ""
    assert (
        reduction_description.outside_state(TorchState(model=model, optimizer=other).handled())
        == ""
    )


def test_optimizers_outside_of_the_state_are_listed_in_one_order():
    def lines(ops: list[Op]) -> list[str]:
        kept = [sgd(net(2, 1), op=op) for op in ops]
        assert kept
        return reduction_description.outside_state([]).splitlines()

    said = lines([Op.AVERAGE, Op.SUM])
    assert "DistributedOptimizer.0.op AVERAGE" in said and "DistributedOptimizer.1.op SUM" in said
    assert lines([Op.SUM, Op.AVERAGE]) == said


def test_requires_grad_is_committed_and_restored():
    model = net(2, 2, 1)
    model[0].requires_grad_(False)
    state = TorchState(model=model)
    model[0].requires_grad_(True)
    model[1].bias.requires_grad_(False)
    state.restore()
    assert [each.requires_grad for each in model.parameters()] == [False, False, True, True]
    model[0].requires_grad_(True)
    state.commit()  # nothing else has changed
    model[0].requires_grad_(False)
    state.restore()
    assert all(each.requires_grad for each in model.parameters())


def test_joining_worker_adopts_the_frozen_parameters_of_the_world():
    there, here = net(2, 2, 1), net(2, 2, 1)
    there[1].requires_grad_(False)
    here[0].requires_grad_(False)
    states = [TorchState(model=there), TorchState(model=here)]
    groups = fake.world(2)
    at_once(lambda state, group: state.transfer(group, 0), states, groups)
    assert [each.requires_grad for each in here.parameters()] == [True, True, False, False]
