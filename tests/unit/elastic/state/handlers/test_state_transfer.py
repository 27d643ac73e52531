"""A transfer brings root's state to workers that lack it, in place, and disturbs nobody when a worker can't take it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn

import elastic
from elastic.collectives import own_gpu
from elastic.errors import Invalid, StateMismatch
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state import ElasticSampler, TorchState
from elastic.state.handlers import python_values, state_transfer
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots.snapshot import same_bits
from harness.fakes import collectives as fake
from harness.golden import raises, recorded
from harness.groups import at_once


def transfer(states: list[TorchState], root: int = 0, **options: Any) -> list[Any]:
    """Bytes copied at each rank, or what was raised there."""

    def one(state: TorchState, group: fake.FakeCollectives) -> Any:
        try:
            return state.transfer(group, root, **options)
        except Exception as error:
            return error

    return at_once(one, states, fake.world(len(states), timeout_s=5.0))


def pair(make: Callable[[int], TorchState], size: int = 2) -> list[TorchState]:
    states = []
    for rank in range(size):
        torch.manual_seed(rank)
        states.append(make(rank))
    return states


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def step(state: TorchState, times: int = 1) -> None:
    for _ in range(times):
        state.optimizer.zero_grad()
        state.model(torch.randn(4, 6)).square().sum().backward()
        state.optimizer.step()


def assert_equal(one: TorchState, other: TorchState) -> None:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert same_bits(tensor, theirs[name]), name
    ours, others = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert ours["param_groups"] == others["param_groups"]
    assert ours["state"].keys() == others["state"].keys()
    for number, entries in ours["state"].items():
        assert entries.keys() == others["state"][number].keys()
        for key, entry in entries.items():
            assert entry is others["state"][number][key] or same_bits(
                torch.as_tensor(entry), torch.as_tensor(others["state"][number][key])
            ), (number, key)


def sgd(rank: int, **options: Any) -> TorchState:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1 + rank, **options})
    return TorchState(model=model, optimizer=optimizer, epoch=rank, log=[rank])


def test_transfer_makes_all_states_equal_to_the_root():
    states = pair(lambda rank: sgd(rank, momentum=0.9), size=3)
    step(states[1], 2)
    results = transfer(states, root=1)
    assert len(set(results)) == 1 and results[0] > 0
    for other in (0, 2):
        assert_equal(states[1], states[other])
        assert (states[other].epoch, states[other].log) == (1, [1])


def test_training_mode_of_modules_is_transferred():
    states = pair(sgd)
    states[0].model[1].eval()
    states[1].model[0].eval()
    transfer(states)
    assert [each.training for each in states[1].model.modules()] == [True, True, False, True]


def test_receivers_are_written_in_place_and_saved_only_on_request():
    states = pair(sgd)
    pointers = [each.data_ptr() for each in states[1].model.parameters()]
    states[1].commit()
    transfer(states)
    assert [each.data_ptr() for each in states[1].model.parameters()] == pointers
    assert states[1].digest() != states[0].digest()  # a transfer does not save
    states[1].save()
    assert states[1].digest() == states[0].digest()


def test_defect_i_newcomer_with_weight_decay_gets_equal_weights():
    states = pair(lambda rank: sgd(rank, momentum=0.9, weight_decay=0.1))
    step(states[0])
    transfer(states)
    assert_equal(*states)
    torch.manual_seed(7)
    step(states[0])
    torch.manual_seed(7)
    step(states[1])
    assert_equal(*states)


def test_defect_j_options_are_transferred_without_any_entries():
    states = pair(sgd)
    states[0].optimizer.param_groups[0]["lr"] = 0.025
    transfer(states)
    assert states[1].optimizer.param_groups[0]["lr"] == 0.025
    assert states[1].optimizer.state_dict()["state"] == {}


def test_entries_missing_on_the_root_are_dropped():
    states = pair(lambda rank: sgd(rank, momentum=0.9))
    step(states[1])
    transfer(states)
    assert_equal(*states)
    assert states[1].optimizer.state_dict()["state"] == {}
    assert all(each.grad is None for each in states[1].model.parameters())


def sorted_text(entries: dict[int, dict[str, Any]]) -> list[str]:
    return sorted(
        f"{number} {key} {value}" for number, own in entries.items() for key, value in own.items()
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, fused=True, amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), capturable=False),
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
        lambda parameters: torch.optim.Rprop(parameters),
    ],
    ids=["fused Adam", "lr a tensor", "LBFGS", "Rprop"],
)
def test_optimizers_of_many_kinds_are_transferred(make):
    def build(rank: int) -> TorchState:
        model = net()
        return TorchState(model=model, optimizer=make(model.parameters()))

    states = pair(build)

    def closure() -> Any:
        states[0].optimizer.zero_grad()
        loss = states[0].model(torch.randn(4, 6)).square().sum()
        loss.backward()
        return loss

    states[0].optimizer.step(closure)
    assert all(isinstance(result, int) for result in transfer(states))
    mine, other = (state.optimizer.state_dict() for state in states)
    assert str(mine["param_groups"]) == str(other["param_groups"])
    assert sorted_text(mine["state"]) == sorted_text(other["state"])


def test_samplers_and_schedulers_are_transferred():
    def build(rank: int) -> TorchState:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TorchState(
            model=model,
            optimizer=optimizer,
            sampler=ElasticSampler(range(20), shuffle=False),
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )

    states = pair(build)
    states[0].optimizer.step()
    states[0].scheduler.step()
    states[0].sampler.record_batch(0, 8)
    transfer(states)
    assert states[1].sampler.remaining_indices == list(range(8, 20))
    assert states[1].scheduler.last_epoch == 1
    assert states[1].optimizer.param_groups[0]["lr"] == 0.05


def decay(total: int) -> Callable[[float], float]:
    return lambda step: 1 - step / total


def annealing(step: int, *, total: int) -> float:
    return max(0.0, 1 - step / total)


def late(total: int) -> Callable[[int], float]:
    """Constant, but for the last tenth."""
    return lambda step: min(1.0, max(0.0, (total - step) / (0.1 * total)))


def from_list(total: int) -> Callable[[int], float]:
    """Raises IndexError after its end."""
    factors = [1 - step / total for step in range(total)]
    return lambda step: factors[step]


Schedule = Callable[[torch.optim.Optimizer, int], Any]
schedulers = torch.optim.lr_scheduler
SCHEDULES: dict[str, Schedule] = {
    "function": lambda optimizer, total: schedulers.LambdaLR(optimizer, decay(total)),
    "partial": lambda optimizer, total: schedulers.LambdaLR(
        optimizer, functools.partial(annealing, total=total)
    ),
    "at the end": lambda optimizer, total: schedulers.LambdaLR(optimizer, late(total)),
    "of a list": lambda optimizer, total: schedulers.LambdaLR(optimizer, from_list(total)),
    "multiplied": lambda optimizer, total: schedulers.MultiplicativeLR(optimizer, decay(total)),
    "in a sequence": lambda optimizer, total: schedulers.SequentialLR(
        optimizer,
        [schedulers.ConstantLR(optimizer), schedulers.LambdaLR(optimizer, decay(total))],
        milestones=[5],
    ),
    "cyclic": lambda optimizer, total: schedulers.CyclicLR(
        optimizer, 0.01, 0.1, scale_fn=decay(total), scale_mode="iterations"
    ),
}


def scheduled(make: Schedule, totals: tuple[int, int]) -> list[TorchState]:
    def build(rank: int) -> TorchState:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = make(optimizer, totals[rank])
        return TorchState(model=model, optimizer=optimizer, schedule=schedule)

    return pair(build)


@pytest.mark.parametrize("name", SCHEDULES)
def test_different_schedule_functions_are_refused_on_the_receiver(name):
    states = scheduled(SCHEDULES[name], (1000, 1100))
    sent, received = transfer(states)
    assert isinstance(sent, int) and isinstance(received, StateMismatch)
    assert_equal(*states)  # nothing of the transfer is cut short


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_schedule_functions_are_accepted_and_restored(name):
    states = scheduled(SCHEDULES[name], (1000, 1000))
    for each in states:
        each.optimizer.step()
    states[0].schedule.step()
    _, received = transfer(states)
    assert isinstance(received, int)
    assert states[1].schedule.last_epoch == 1
    states[1].save()
    states[1].schedule.step()
    states[1].restore()
    assert states[1].schedule.last_epoch == 1


@pytest.mark.parametrize("schedule", [schedulers.LinearLR, schedulers.OneCycleLR])
def test_schedules_with_numeric_lengths_adopt_the_length_of_rank_0(schedule):
    states = scheduled(
        lambda optimizer, total: (
            schedule(optimizer, total_iters=total)
            if schedule is schedulers.LinearLR
            else schedule(optimizer, 0.1, total_steps=total)
        ),
        (100, 200),
    )
    _, received = transfer(states)
    assert isinstance(received, int)
    for each in states:
        each.optimizer.step()
        each.schedule.step()
    one, other = (each.optimizer.param_groups[0]["lr"] for each in states)
    assert one == other


def test_a_schedule_function_may_read_a_value_of_the_state():
    def build(rank: int) -> TorchState:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        known: dict[str, TorchState] = {}
        factor = decay(7)
        schedule = schedulers.LambdaLR(
            optimizer, lambda step: factor(step) * known["state"].scale if known else 1.0
        )
        state = TorchState(model=model, optimizer=optimizer, schedule=schedule, scale=1.0 + rank)
        known["state"] = state
        return state

    _, received = transfer(pair(build))
    assert isinstance(received, int)


class Odd(nn.Module):
    """Tensors that can't be written straight into, at least on one side."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        content = torch.randn(5, 7)
        self.strided = nn.Parameter(content.t() if rank else content.t().contiguous())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.flags = nn.Parameter(torch.randint(0, 9, (3,), dtype=torch.uint8), False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.sparse = nn.Parameter((rank + torch.eye(3)).to_sparse())
        self.register_buffer("expanded", torch.randn(1, 4).expand(3, 4))
        self.register_buffer(
            "uneven", torch.randn(1, 4).expand(3, 4) if rank else torch.randn(3, 4)
        )
        self.register_buffer("observed", torch.randn(2 if rank else 5))
        self.register_buffer("seen", None if rank else torch.randn(2))
        self.register_buffer("unseen", torch.randn(2) if rank else None)
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("grown", torch.randn(3 if rank else 9), persistent=False)
        self.steps = rank

    def get_extra_state(self):
        return self.steps

    def set_extra_state(self, state):
        self.steps = state


def test_tensors_of_every_kind_are_transferred():
    states = pair(lambda rank: TorchState(model=Odd(rank)))
    one, two = states[0].model, states[1].model
    assert all(isinstance(result, int) for result in transfer(states))
    for name in ("strided", "scalar", "empty", "flags", "wide", "expanded", "uneven", "observed"):
        assert same_bits(getattr(one, name), getattr(two, name)), name
    assert same_bits(one.seen, two.seen)
    assert two.unseen is None
    assert torch.equal(one.sparse.to_dense(), two.sparse.to_dense())
    assert same_bits(one.cache, two.cache)
    assert two.grown.shape == (3,)  # a cache of another shape is the model's own business
    assert two.steps == 0


def test_small_tensors_share_broadcasts_and_large_ones_are_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(state_transfer, "PACK", 1024)
    monkeypatch.setattr(state_transfer, "PIECE", 4096)
    calls: list[int] = []
    real = fake.FakeCollectives.broadcast

    def counting(group, tensor, root):
        if group.rank == 0:
            calls.append(tensor.nbytes)
        return real(group, tensor, root)

    monkeypatch.setattr(fake.FakeCollectives, "broadcast", counting)

    def build(rank: int) -> TorchState:
        layers = [nn.Linear(2, 2, bias=False) for _ in range(100)]
        return TorchState(model=nn.Sequential(*layers, nn.Linear(50, 50)))

    states = pair(build)
    transfer(states)
    for one, two in zip(states[0].model.parameters(), states[1].model.parameters(), strict=True):
        assert same_bits(one, two)
    tensors = calls[2:]  # after the header's length and the header
    assert tensors == [1024, 4096, 4096, 10000 - 8192, 576 + 208]


def test_receiver_with_another_model_is_refused_and_remaining_receivers_are_served():
    states = pair(sgd, size=2)
    torch.manual_seed(9)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    stranger = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    before = model[2].weight.clone()
    results = transfer([states[0], stranger, states[1]])
    assert isinstance(results[1], StateMismatch)
    recorded("messages", str(results[1]))
    recorded("messages", str(results[1]))
    assert results[0] == results[2] > 0
    assert_equal(*states)
    assert same_bits(model[2].weight, before)


def test_unreadable_value_is_an_error_only_on_the_affected_receiver(monkeypatch):
    states = pair(sgd, size=3)
    real = python_values.loads

    def loads(content, referred):
        if referred["model"] is states[1].model:
            raise ModuleNotFoundError("No module named 'mine'")
        return real(content, referred)

    monkeypatch.setattr(state_transfer, "loads", loads)
    results = transfer(states)
    assert isinstance(results[1], StateMismatch)
    recorded("messages", str(results[1]))
    assert results[0] == results[2] > 0


def test_value_that_cannot_be_pickled_is_refused():
    class Stubborn:
        def __reduce__(self):
            raise TypeError("never")

        def __deepcopy__(self, memo):
            return self

    state = TorchState(model=net(), good=1, stubborn=Stubborn())
    with raises(Invalid):
        state.transfer(fake.world(2)[0], 0)


def test_transferred_reference_to_the_model_is_the_receivers_model():
    states = pair(lambda rank: TorchState(model=(model := net()), holder={"net": model}))
    transfer(states)
    assert states[1].holder["net"] is states[1].model


found: list[str] = []


def looked_up() -> list[str]:
    return list(found)


class Reference:
    """A value that a receiver looks up, as a process set is."""

    def __reduce__(self):
        return looked_up, ()


def test_value_that_refers_to_an_object_when_decoded_then_the_object_has_been_received():
    states = pair(lambda rank: TorchState(value=Reference() if rank == 0 else []))
    found.clear()
    transfer(states, before_decoding=lambda: found.append("received"))
    assert "received" in states[1].value


def test_unexpected_differences_of_parameters_are_logged_with_their_names(caplog):
    states = pair(sgd)
    with torch.no_grad():
        for one, two in zip(*(state.model.parameters() for state in states), strict=True):
            two.copy_(one)
        states[1].model[2].bias[0] += 1
    states[1].save()
    transfer(states, expected_equal=True)
    recorded("log", caplog.text)
    assert caplog.text.rstrip().endswith("model.2.bias")
    caplog.clear()
    states[1].save()
    transfer(states, expected_equal=True)
    assert caplog.text == ""


def test_world_of_one_transfers_no_bytes():
    assert sgd(0).transfer(fake.world(1)[0], 0) == 0


def test_backward_passes_per_step_is_transferred_with_an_optimizer(monkeypatch):
    monkeypatch.setattr(lifecycle, "_runtime", WorkerRuntime(worker_settings.read({}), None))
    monkeypatch.setattr(lifecycle, "_initialized", True)

    def make(rank: int) -> TorchState:
        model = net()
        optimizer = elastic.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return TorchState(model=model, optimizer=optimizer)

    states = pair(make)
    states[0].optimizer.set_backward_passes_per_step(2)
    assert all(isinstance(each, int) for each in transfer(states))
    assert states[1].optimizer.backward_passes_per_step == 2


# ---- over which group ----------------------------------------------------------------------------

GPU = torch.device("cuda", 1)
SPECS = {
    ("model", "weight"): TensorSpec((4,), torch.float32, "cuda"),
    ("optimizer", "0.step"): TensorSpec((), torch.float32),
    ("model", "bias"): TensorSpec((2,), torch.float32, "cuda"),
}


def roads(
    monkeypatch, gpus: list[torch.device | None], uuids: list[str] | None = None
) -> list[list[tuple[str, list[str]]]]:
    """For each rank, which has this GPU: the device and the tensors of each group, in the order of their broadcasts."""
    own = threading.local()
    known = uuids or [f"GPU-{rank}" for rank in range(len(gpus))]
    monkeypatch.setattr(state_transfer, "_gpu", lambda where: own.gpu)
    monkeypatch.setattr(own_gpu, "uuid", lambda device: own.uuid)

    def one(gpu: torch.device | None, uuid: str, group: fake.FakeCollectives) -> Any:
        own.gpu, own.uuid = gpu, uuid
        made = state_transfer._roads(
            group, SPECS, dict.fromkeys(SPECS, Destination.NEW), lambda device: group
        )
        return [(device.type, [key for _, key in specs]) for _, device, specs in made]

    return at_once(one, gpus, known, fake.world(len(gpus), timeout_s=5.0))


def test_tensors_on_the_gpu_of_the_root_are_sent_between_gpus(monkeypatch):
    expected = [("cpu", ["0.step"]), ("cuda", ["weight", "bias"])]
    assert roads(monkeypatch, [GPU, torch.device("cuda", 0)]) == [expected] * 2


@pytest.mark.parametrize("gpus", [[GPU, None], [None, GPU], [GPU, GPU, None]])
def test_tensors_are_sent_through_host_memory_when_one_rank_has_no_gpu(monkeypatch, gpus):
    assert roads(monkeypatch, gpus) == [[("cpu", [key for _, key in SPECS])]] * len(gpus)


@pytest.mark.parametrize(("uuids", "types"), [("aab", {"cpu"}), ("abc", {"cpu", "cuda"})])
def test_ranks_that_share_a_gpu_use_host_memory(monkeypatch, uuids, types):
    for road in roads(monkeypatch, [GPU] * 3, list(uuids)):
        assert {type for type, _ in road} == types


def test_gpus_without_a_uuid_count_as_different(monkeypatch):
    assert len(roads(monkeypatch, [GPU] * 2, ["", ""])[0]) == 2


def test_cpu_tensors_need_no_agreement():
    group = fake.world(2)[0]  # whose peer would be waited for
    specs = {("model", "weight"): TensorSpec((4,), torch.float32)}
    assert state_transfer._roads(group, specs, {}, None) == [(group, torch.device("cpu"), specs)]


def test_tensor_on_a_foreign_gpu_selects_no_device_for_the_transfer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(own_gpu, "_index", 0)
    tensor = create_autospec(torch.Tensor, instance=True)
    tensor.is_cuda, tensor.device = True, GPU
    assert state_transfer._gpu({("model", "weight"): tensor}) is None
    tensor.device = torch.device("cuda", 0)
    assert state_transfer._gpu({("model", "weight"): tensor}) == tensor.device
    assert state_transfer._gpu({("model", "weight"): Destination.NEW}) == tensor.device
