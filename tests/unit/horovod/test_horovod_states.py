"""States, samplers and handlers as subclassed by scripts for Horovod."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.state import has_custom_sync
from horovod.common.elastic import ObjectState, State
from horovod.torch.elastic.state import (
    ModelStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)


@pytest.fixture(autouse=True)
def world_of_one(monkeypatch):
    """Initialized without elasticrun."""
    monkeypatch.setattr(lifecycle, "_runtime", WorkerRuntime(worker_settings.read({}), None))
    monkeypatch.setattr(lifecycle, "_initialized", True)


class Rows:
    """Rank 0's answer to a broadcast, and the broadcast value."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def __call__(self, value: Any) -> Any:
        self.asked.append(value)
        return value if self.answer is None else self.answer


class Counters(State):
    """All three methods are overridden, with the script's broadcast."""

    def __init__(self, bcast_object: Any, get_rank: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self.counts = {"seen": 0}
        self.kept = copy.deepcopy(self.counts)

    def save(self) -> None:
        self.kept = copy.deepcopy(self.counts)

    def restore(self) -> None:
        self.counts = copy.deepcopy(self.kept)

    def sync(self) -> None:
        self.counts = self._bcast_object(self.counts)
        self.save()


class Values(ObjectState):
    """Adopts rank 0's saved values, as Horovod's own does."""

    def sync(self) -> None:
        received = self._bcast_object(self._saved_state)
        if self._rank() != 0:
            self._saved_state = received
            self._set_attrs()


def test_state_with_custom_methods_is_saved_restored_and_synchronized():
    state = Counters(Rows(answer={"seen": 7}), lambda: 1)
    assert has_custom_sync(state), "called by all workers in every world"
    attempts = 0

    @hvd.elastic.run
    def train(state: Counters) -> int:
        nonlocal attempts
        attempts += 1
        state.counts["seen"] += 1
        if attempts == 1:
            state.commit()
            state.counts["seen"] = 100
            raise hvd.HorovodInternalError("a collective failed")
        return state.counts["seen"]

    assert train(state) == 9, "7 were rank 0's, 1 was committed, 1 came after"


def test_object_state_with_a_custom_broadcast_is_synchronized_and_restored():
    state = Values(Rows(answer={"epoch": 3, "seen": [1, 2]}), lambda: 1, epoch=0, seen=[])
    assert has_custom_sync(state)
    state.sync()
    assert (state.epoch, state.seen) == (3, [1, 2])
    state.seen.append(3)
    state.restore()
    assert state.seen == [1, 2]


def test_sync_on_rank_0_keeps_its_state():
    rows = Rows()
    state = Values(rows, lambda: 0, epoch=5)
    state.sync()
    assert (state.epoch, rows.asked) == (5, [{"epoch": 5}])


def test_broadcast_of_the_runtime_is_no_custom_sync():
    state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=2)
    assert not has_custom_sync(state)
    assert state._bcast_object({"a": 1}) == {"a": 1}
    assert ObjectState(epoch=2)._bcast_object("x", root_rank=0, name="y") == "x"


def test_any_number_of_models_optimizers_and_samplers_by_keyword():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    states: dict[str, Any] = {
        "generator": first,
        "critic": second,
        "generator_optimizer": torch.optim.SGD(first.parameters(), lr=0.1),
        "critic_optimizer": torch.optim.SGD(second.parameters(), lr=0.2),
        "sampler": hvd.elastic.ElasticSampler([1, 2, 3], shuffle=False),
    }
    state = hvd.elastic.TorchState(**states, epoch=0)
    state.commit()
    with torch.no_grad():
        second.weight.fill_(9.0)
    state.critic_optimizer.param_groups[0]["lr"] = 5.0
    state.sampler.record_batch(0, 1)
    state.epoch = 4
    state.restore()
    assert not (second.weight == 9.0).any()
    assert state.critic_optimizer.param_groups[0]["lr"] == 0.2
    assert (state.sampler.processed_num, state.epoch) == (0, 0)


class Scores:
    def __init__(self) -> None:
        self.values: list[float] = []


class ScoresHandler(StateHandler):
    """As in Horovod's handlers: it saves when it is created."""

    synced = 0

    def __init__(self, scores: Scores) -> None:
        super().__init__(scores)
        self._saved = copy.deepcopy(scores.values)

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.values)

    def restore(self) -> None:
        self.value.values = copy.deepcopy(self._saved)

    def sync(self) -> None:
        type(self).synced += 1
        self.save()


class NoisyModelHandler(ModelStateHandler):
    restored = 0

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)

    def restore(self) -> None:
        type(self).restored += 1
        super().restore()


@pytest.fixture
def registered():
    ours = get_handler_registry()
    set_handler_registry([(Scores, ScoresHandler), (torch.nn.Module, NoisyModelHandler), *ours])
    yield
    set_handler_registry(ours)


def test_custom_handlers_of_a_script_are_used(registered):
    scores, model = Scores(), torch.nn.Linear(1, 1)
    state = TorchState(model=model, scores=scores, epoch=0)
    assert has_custom_sync(state), "a handler with a sync of its own is called on every worker"
    scores.values.append(0.5)
    weight = model.weight.detach().clone()
    state.commit()
    scores.values.append(0.7)
    with torch.no_grad():
        model.weight.add_(1.0)
    state.restore()
    assert scores.values == [0.5]
    assert torch.equal(model.weight, weight)
    assert NoisyModelHandler.restored == 1
    state.sync()
    assert ScoresHandler.synced == 1


def test_a_handled_value_is_replaced_by_assignment(registered):
    state = TorchState(scores=Scores())
    other = Scores()
    other.values = [1.0]
    state.scores = other
    other.values.append(2.0)
    state.restore()
    assert state.scores is other
    assert other.values == [1.0]
