"""A TorchState's commit and restore: exactly the committed bits, whatever changed them and however quietly."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from elastic.collectives.shared_memory.host_copy import HostCopy
from elastic.diloco.diloco import DiLoCo
from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.state import ElasticSampler, TorchState
from elastic.state.handler_registry import get_handler_registry, set_handler_registry
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.handlers.part import StateHandler
from elastic.state.snapshots import change_detection
from elastic.state.snapshots.snapshot import SMALL, same_bits
from elastic.state.state import has_custom_sync
from harness.golden import raises, recorded

WIDE = 96  # WIDE * WIDE elements are too many to be compared whole


def mlp(*, norm: bool = False) -> Any:
    layers = [
        nn.Linear(WIDE, WIDE),
        nn.BatchNorm1d(WIDE) if norm else nn.ReLU(),
        nn.Linear(WIDE, 4),
    ]
    return nn.Sequential(*layers)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_bits(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    present = model.state_dict()
    assert present.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(present[name], tensor), name


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, WIDE)).square().sum().backward()
    optimizer.step()


assert WIDE * WIDE > SMALL


# ---- every way to change a tensor must be seen by the next commit --------------------------------


def fused_adam(model: nn.Module) -> None:
    step(model, torch.optim.Adam(model.parameters(), fused=True))


def quiet_add(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1.0)


def from_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) + 1.0, model.parameters())


def running_statistics(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randn(8, WIDE))


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def load_assigned(model: nn.Module) -> None:
    model.load_state_dict(
        {name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True
    )


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def one_element_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters())[3, 5] += 1.0


def one_quiet_element_after_a_forward(model: nn.Module) -> None:
    model(torch.randn(8, WIDE))  # BatchNorm counts it
    next(model.parameters()).data[3, 5] += 1.0


def one_quiet_element_after_a_backward(model: nn.Module) -> None:
    model.eval()
    model(torch.randn(8, WIDE)).sum().backward()
    next(model.parameters()).data[3, 5] += 1.0


CHANGES = [
    fused_adam,
    quiet_add,
    from_vector,
    running_statistics,
    other_data,
    load_state_dict,
    load_assigned,
    in_place,
    one_element_in_place,
    one_quiet_element_after_a_forward,
    one_quiet_element_after_a_backward,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_commit_detects_every_change_and_a_restore_reverts_the_change(change):
    model = mlp(norm=True)
    state = TorchState(model=model)
    state.commit()  # from here on nothing seems to have happened
    change(model)
    expected = bits(model)
    state.commit()
    change(model)
    state.restore()
    assert_bits(model, expected)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_restore_without_a_commit_returns_to_the_initial_model(change):
    model = mlp(norm=True)
    expected = bits(model)
    state = TorchState(model=model)
    change(model)
    state.restore()
    assert_bits(model, expected)


def test_an_unchanged_state_is_not_copied_again(monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    state = TorchState(model=model, optimizer=optimizer, epoch=0)
    copies: list[int] = []
    real = HostCopy.run

    def counting(self: HostCopy, tensors: list[torch.Tensor], pointers: list[int]) -> None:
        copies.append(len(tensors))
        real(self, tensors, pointers)

    monkeypatch.setattr(HostCopy, "run", counting)
    state.commit()
    assert copies == []
    step(model, optimizer)
    state.commit()
    assert copies == [4, 4]  # parameters, momenta
    state.restore()
    state.commit()
    assert copies == [4, 4]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # a FutureWarning from torch 2.15 on
def test_handled_model_can_be_scripted_and_a_scripted_one_handled():
    state = TorchState(model=mlp())
    state.commit()
    model: Any = torch.jit.script(state.model)
    state.model = model
    running = bits(model)
    quiet_add(model)
    state.restore()
    assert_bits(model, running)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.slow
def test_compiled_step_is_detected_without_recompilation():
    graphs: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model = mlp()
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=compiled, optimizer=optimizer)
    fast_step: Any = torch.compile(optimizer.step, backend=backend)
    made: list[int] = []
    for _ in range(4):
        optimizer.zero_grad()
        compiled(torch.ones(8, WIDE)).sum().backward()
        fast_step()
        before = change_detection.moment()
        fast_step()
        assert change_detection.moment() != before
        state.commit()
        made.append(len(graphs))
    assert made[1:] == [made[1]] * 3
    expected = bits(model)
    step(compiled, optimizer)
    state.restore()
    assert_bits(model, expected)


# ---- what a restore sets back --------------------------------------------------------------------


def test_a_restore_writes_into_the_same_storages():
    model = mlp()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    state = TorchState(model=model)
    in_place(model)
    state.restore()
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_training_mode_of_modules_is_restored():
    """A worker may be lost while others evaluate, and who comes for it trains."""
    model = mlp(norm=True)
    model[1].eval()
    state = TorchState(model=model)
    model.eval()
    state.restore()
    assert [each.training for each in model.modules()] == [True, True, False, True]


def test_gradients_and_pass_counters_are_cleared():
    class Counting(torch.optim.SGD):
        def _reset_passes(self) -> None:
            self.passes = 0

    model = mlp()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.passes = 3
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer)
    state.restore()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.passes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), fused=True),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    ],
    ids=["SGD", "Adam", "fused Adam, lr a tensor", "LBFGS", "Adagrad"],
)
def test_training_resumed_from_a_commit_has_the_same_bits(make):
    def train(steps: int) -> None:
        for _ in range(steps):
            data = torch.randn(8, WIDE, generator=generator)

            def loss(data: torch.Tensor = data) -> Any:
                optimizer.zero_grad()
                value = model(data).square().mean()
                value.backward()
                return value.detach()

            optimizer.step(loss)

    generator = torch.Generator().manual_seed(1)
    model = mlp()
    optimizer = make(model.parameters())
    state = TorchState(model=model, optimizer=optimizer)
    train(2)
    state.commit()
    resumed = generator.get_state()
    train(2)
    expected = bits(model)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    state.restore()
    generator.set_state(resumed)
    train(2)
    assert_bits(model, expected)


def test_entries_newer_than_the_commit_are_dropped_and_lost_ones_restored():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer)
    state.restore()
    assert optimizer.state_dict()["state"] == {}
    step(model, optimizer)
    state.commit()
    momentum = optimizer.state[model[0].weight]["exp_avg"].clone()
    optimizer.state.clear()
    state.restore()
    assert same_bits(optimizer.state[model[0].weight]["exp_avg"], momentum)


def test_groups_and_options_are_restored():
    model, extra = mlp(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    state = TorchState(model=model, optimizer=optimizer)
    group["lr"], group["note"] = 5.0, "new"
    optimizer.add_param_group({"params": extra.parameters(), "lr": 1.0})
    state.restore()
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0] is group  # schedulers hold on to it
    assert group["lr"] == 0.1
    assert "note" not in group


def test_a_scheduler_is_restored_in_place():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    optimizer.step()
    scheduler.step()
    state.commit()
    optimizer.step()
    scheduler.step()
    state.restore()
    assert state.scheduler is scheduler
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.5)


def test_optimizer_with_a_custom_state_dict_is_saved_by_its_state_dict():
    class Slow(torch.optim.SGD):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.slow = torch.zeros(3)

        def state_dict(self):
            return {**super().state_dict(), "slow": self.slow}

        def load_state_dict(self, state_dict):
            self.slow = state_dict.pop("slow")
            super().load_state_dict(state_dict)

    model = mlp()
    optimizer = Slow(model.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer)
    optimizer.slow.add_(1)
    state.commit()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    step(model, optimizer)
    optimizer.slow.add_(1)
    state.restore()
    assert optimizer.slow.tolist() == [1, 1, 1]
    assert same_bits(optimizer.state[model[0].weight]["momentum_buffer"], momentum)


def test_random_generators_are_restored_on_request():
    def draw() -> list[float]:
        return [torch.rand(1).item(), numpy.random.rand(), random.random()]

    state = TorchState(rng=True)
    state.commit()
    first = draw()
    state.restore()
    assert draw() == first
    assert TorchState(rng=numpy.random.default_rng(1)).rng is not None  # a script's own value


def test_sampler_is_restored_with_the_state():
    sampler = ElasticSampler(range(10), shuffle=False)
    state = TorchState(sampler=sampler, epoch=0)
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    state.restore()
    assert (sampler.processed_num, sampler.remaining_indices) == (4, [4, 5, 6, 7, 8, 9])


# ---- several parts, other values, handlers -------------------------------------------------------


def test_models_and_optimizers_may_have_any_names():
    one, two = mlp(), mlp()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two)]
    state = TorchState(generator=one, critic=two, first=optimizers[0], second=optimizers[1], n=1)
    expected = bits(one), bits(two)
    step(one, optimizers[0])
    step(two, optimizers[1])
    state.restore()
    assert_bits(one, expected[0])
    assert_bits(two, expected[1])
    assert state.model is None


def test_assigned_model_replaces_the_handled_one():
    state = TorchState(model=mlp())
    other = mlp()
    expected = bits(other)
    state.model = other
    in_place(other)
    state.restore()
    assert state.model is other
    assert_bits(other, expected)


def test_attribute_may_change_between_handled_and_plain():
    state = TorchState(epoch=1)
    state.model = model = mlp()
    state.epoch = nn.Linear(2, 2)
    assert "model.0.weight float32 [96, 96]" in state.layout()
    state.epoch = 5
    state.restore()
    assert (state.epoch, state.model) == (5, model)


def test_reference_to_the_model_is_kept_by_a_restore():
    model = mlp()
    state = TorchState(model=model, trainer={"net": model, "n": 1})
    state.trainer["n"] = 2
    state.restore()
    assert state.trainer["n"] == 1
    assert state.trainer["net"] is model


def test_handler_can_be_used_without_a_state():
    model = mlp()
    expected = bits(model)
    handler = ModelStateHandler(model)
    in_place(model)
    handler.restore()
    assert_bits(model, expected)
    in_place(model)
    handler.sync()  # a world of one: saves
    expected = bits(model)
    in_place(model)
    handler.restore()
    assert_bits(model, expected)


def test_script_may_register_its_own_handlers():
    class Counter:
        n = 0

    class CounterHandler(StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.n

        def restore(self):
            self.value.n = self.saved

        def sync(self):
            self.value.n += 100

    ours = get_handler_registry()
    set_handler_registry([(Counter, CounterHandler), *ours])
    try:
        state = TorchState(model=mlp(), counter=Counter())
    finally:
        set_handler_registry(ours)
    state.counter.n = 1
    state.commit()
    state.counter.n = 2
    state.restore()
    assert state.counter.n == 1
    assert has_custom_sync(state)
    state.sync()
    assert state.counter.n == 101
    assert not has_custom_sync(TorchState(model=mlp()))


def test_a_value_that_cannot_be_copied_costs_no_committed_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(model=model, optimizer=optimizer, best=None, step=1)
    step(model, optimizer)
    state.commit()
    committed = bits(model)
    step(model, optimizer)
    state.step, state.best = 2, threading.Lock()
    with pytest.raises(Invalid, match=r"state\.best"):
        state.commit()
    assert state.valid()
    state.restore()
    assert_bits(model, committed)
    assert (state.step, state.best) == (1, None)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda model, sgd: {"model": model.state_dict()},
        lambda model, sgd: {"model": sgd, "optimizer": model},
        lambda model, sgd: {"optimizer": sgd.state_dict()},
    ],
)
def test_unsupported_types_of_models_and_optimizers_are_refused(arguments):
    """A dict of tensors would be kept as a Python value, and the replicas would drift apart."""
    model = mlp()
    with raises(Invalid):
        TorchState(**arguments(model, torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    "hidden",
    [
        nn.Parameter(torch.ones(2)),
        [nn.Linear(1, 1)],
        {"a": torch.optim.SGD([torch.ones(1)])},
        [DiLoCo(nn.Linear(1, 1), None, every=2)],
        {"a": Shards(2)},
    ],
)
def test_values_that_a_restore_would_replace_by_an_untrained_copy_are_refused(hidden):
    with raises(Invalid):
        TorchState(x=hidden)
    state = TorchState(model=nn.Linear(1, 1), x=None, step=0)
    with raises(Invalid):
        state.x = hidden
    state.x = [state.model]  # goes on pointing to it


def test_failed_save_leaves_no_complete_commit(caplog):
    class Moody(torch.optim.SGD):
        broken = False

        def state_dict(self):
            if self.broken:
                raise OSError("no")
            return super().state_dict()

    model = mlp()
    optimizer = Moody(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    Moody.broken = True
    step(model, optimizer)
    present = bits(model)
    with pytest.raises(OSError):
        state.commit()
    assert not state.valid()
    state.restore()
    recorded("log", caplog.text)
    assert_bits(model, present)
    assert state.digest() == 0


def test_defect_h_sync_commits_the_received_state():
    model = mlp()
    state = TorchState(model=model)
    in_place(model)
    expected = bits(model)
    state.sync()
    in_place(model)
    state.restore()
    assert_bits(model, expected)


@pytest.mark.gpu
def test_a_cuda_model_is_committed_and_restored():
    model = mlp(norm=True).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model=model, optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, WIDE, device="cuda")).sum().backward()
        optimizer.step()
        state.commit()
    expected = bits(model)
    quiet_add(model)  # at once: the copy to the host may still be under way
    state.restore()
    assert_bits(model, expected)


@pytest.mark.gpu
def test_pending_cuda_commit_is_completed_before_a_restore():
    model = nn.Linear(1024, 1024).cuda()
    sampler = ElasticSampler(range(100))
    state = TorchState(model=model, sampler=sampler, n=0)
    torch.cuda._sleep(2_000_000_000)  # the stream is busy for about a second
    in_place(model)
    sampler.record_batch(0, 10)
    state.n = 2
    state.save()
    assert state.valid()
    expected = bits(model)
    quiet_add(model)
    state.restore()
    assert (state.n, sampler.processed_num) == (2, 10)
    assert_bits(model, expected)


@pytest.mark.parametrize("broken", ["unscaled", "stepped"])
def test_gradient_scaler_works_after_a_step_that_was_interrupted(broken):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = TorchState(model=model, optimizer=optimizer, scaler=scaler)

    def backward() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)

    state.save()
    backward()
    if broken == "stepped":
        scaler.step(optimizer)
    state.restore()
    backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_a_scaler_that_is_off_is_restored():
    state = TorchState(scaler=torch.amp.GradScaler("cpu", enabled=False))
    state.save()
    state.restore()
    assert not state.scaler.is_enabled() and state.scaler.get_scale() == 1.0
