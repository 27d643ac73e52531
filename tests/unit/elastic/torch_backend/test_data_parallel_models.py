"""DistributedDataParallel models that are trained in another world than that of their reducers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import elastic
from elastic.errors import Fixed, NotElastic
from elastic.state import TorchState
from elastic.torch_backend import sharding_guard
from elastic.torch_backend.group_names import names
from harness.golden import raises


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(names, "generation", 0)
    elastic.init()
    distributed.init_process_group("elastic", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    elastic.shutdown()


def replica() -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(2, 1))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_replica_outside_of_a_state_when_trained_under_run_then_refused():
    optimizer = sgd(model := replica())
    state = TorchState(optimizer=optimizer)
    names.enter(1)
    with raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 1, 1)
    assert refused.value.kind is Fixed.REPLICA
    del model, state


@pytest.mark.parametrize("holder", [torch.nn.Sequential, lambda model: model])
def test_replica_in_a_state_when_trained_in_later_worlds_then_accepted(holder: Any):
    model = replica()
    optimizer = sgd(model)
    state = TorchState(model=holder(model), optimizer=optimizer)
    for generation in (1, 2):
        names.enter(generation)
        state.on_reset()
        sharding_guard.check(optimizer, generation, 1)


def test_replica_whose_module_is_in_the_state_when_trained_then_refused():
    optimizer = sgd(model := replica())
    state = TorchState(model=model.module, optimizer=optimizer)
    names.enter(1)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 1, 1)
    assert refused.value.kind is Fixed.REPLICA
    del model, state


def test_replica_in_another_state_when_trained_then_refused():
    optimizer = sgd(model := replica())
    other = TorchState(model=model, optimizer=optimizer)
    sharding_guard.begin(TorchState(step=0).handled())
    names.enter(1)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 1, 1)
    assert refused.value.kind is Fixed.REPLICA
    del other


def test_replica_made_under_run_when_trained_then_accepted_in_its_world_only():
    names.enter(1)
    optimizer = sgd(model := replica())
    sharding_guard.check(optimizer, 1, 1)
    names.enter(2)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 2, 1)
    assert refused.value.kind is Fixed.REPLICA
    del model


def test_replica_that_no_optimizer_trains_when_another_is_trained_then_accepted():
    teacher, student = replica(), torch.nn.Linear(2, 1)
    names.enter(1)
    sharding_guard.check(sgd(student), 1, 1)
    del teacher


def test_replica_over_another_process_group_when_trained_then_accepted():
    group = elastic.island_group()
    optimizer = sgd(model := DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group))
    names.enter(1)
    sharding_guard.check(optimizer, 1, 1)
    del model


def test_replica_that_was_dropped_when_its_module_is_wrapped_again_then_accepted():
    network = torch.nn.Linear(2, 1)
    first: Any = DistributedDataParallel(network)
    first.itself = [first]
    del first
    model = DistributedDataParallel(network)
    optimizer = sgd(model)
    state = TorchState(model=model, optimizer=optimizer)
    names.enter(1)
    sharding_guard.check(optimizer, 1, 1)
    del state
