"""Observations in real steps of torch, in a world of one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils import data as torch_data

from elastic import data
from elastic.errors import ScriptMistakes
from elastic.monitoring import moved_tensors
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.protocol.messages import MistakeFound, Place
from elastic.rendezvous import distributed_samplers
from elastic.rendezvous.script_files import script_files
from elastic.runtime import lifecycle
from elastic.script_checks import source_analysis
from elastic.script_checks.mistakes import STEPS, Kind
from elastic.script_checks.observer import ScriptObserver
from elastic.state.state import ObjectState
from elastic.state.torch_state import TorchState


class Job:
    """A training of one process, with batches from ``batches``."""

    def __init__(self) -> None:
        lifecycle.init()
        self.rt = lifecycle.current()
        self.rt.training.enter()
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.samples = torch_data.TensorDataset(torch.ones(500, 2))
        self.observers: list[ScriptObserver] = []
        self.batches = iter(lambda: [torch.ones(1, 2)], None)

    def train(self, state: TorchState | ObjectState, steps: int = STEPS, *, commit: bool = True):
        for _ in range(steps):
            (x,) = next(self.batches)
            self.optimizer.zero_grad()
            functional.mse_loss(self.model(x), torch.zeros(len(x), 1)).backward()
            self.optimizer.step()
            if commit:
                state.commit()

    def whole(self, **others: object) -> TorchState:
        return TorchState(model=self.model, optimizer=self.optimizer, **others)

    def observes(self, state, function=None) -> ScriptObserver:
        found = ScriptObserver(self.rt, state, function or self.train)
        found.meet()
        found.begin()
        self.observers.append(found)
        return found


@pytest.fixture(autouse=True, scope="module")
def objects_of_their_own():
    """Each observer scans all objects and collects garbage, which takes half a second with those of other tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def script_of_one_file(monkeypatch):
    """All other test files of this process would be parsed as parts of the script."""
    files = script_files

    def own(modules: Mapping[str, object]) -> list[str]:
        return [file for file in files(modules) if file == __file__]

    monkeypatch.setattr(source_analysis, "script_files", own)


@pytest.fixture
def job(monkeypatch):
    made = Job()
    made.rt.training.begins()
    yield made
    for each in made.observers:
        each.end()
    made.rt.training.leave()
    lifecycle.shutdown()


@pytest.fixture
def following():
    """Environment of a worker of an elastic job."""
    distributed_samplers.install(lambda: lifecycle.current().place)
    yield
    distributed_samplers.uninstall()


def reported(observer: ScriptObserver) -> set[Kind]:
    return observer._reported


def test_correct_script_is_not_reported(job, capsys):
    state = job.whole(step=0)
    watching = job.observes(state)
    job.train(state)
    assert reported(watching) == set()
    assert capsys.readouterr().err == ""


def test_changes_after_the_first_steps_are_not_observed(job):
    state = job.whole(step=0)
    watching = job.observes(state)
    job.train(state)
    job.optimizer = torch.optim.Adam(job.model.parameters())
    job.train(state)
    assert reported(watching) == set()


def test_mistakes_are_printed_on_one_line_each_on_rank_0(job, capsys):
    state = ObjectState(step=0)
    watching = job.observes(state)
    job.train(state)
    assert reported(watching) == {Kind.MODEL_NOT_IN_STATE, Kind.OPTIMIZER_NOT_IN_STATE}
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("held", [True, False])
def test_members_missing_in_the_state_are_reported(job, held):
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 5)
    child = torch.optim.lr_scheduler.ConstantLR(job.optimizer)
    chained = torch.optim.lr_scheduler.ChainedScheduler([child], job.optimizer)
    average = AveragedModel(job.model)
    average.update_parameters(job.model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    others = dict(scheduler=scheduler, chained=chained, average=average, scaler=scaler)
    state = job.whole(step=0, **(others if held else {}))
    watching = job.observes(state)
    job.train(state)
    missed = {Kind.SCHEDULER_NOT_IN_STATE, Kind.SCALER_NOT_IN_STATE, Kind.AVERAGE_NOT_IN_STATE}
    assert reported(watching) == (set() if held else missed)


class NativeScaler:
    """A wrapper as in timm."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")
        self._scaler.scale(torch.ones(1))

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state) -> None:
        self._scaler.load_state_dict(state)


def test_member_within_a_wrapper_is_recognized_in_the_state(job):
    state = job.whole(step=0, scaler=NativeScaler())
    watching = job.observes(state)
    job.train(state)
    assert reported(watching) == set()


class Resuming(torch_data.IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield (torch.ones(2),)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state) -> None:
        self.position = state["position"]


def test_zero_optimizer_is_recognized_as_training_the_model_of_the_state(job):
    job.optimizer = DistributedOptimizer(job.optimizer, job.model.named_parameters(), zero=1)
    state = job.whole(step=0)
    watching = job.observes(state)
    job.train(state)
    assert reported(watching) == set()


def test_inner_optimizer_of_the_previous_world_is_not_reported(job):
    state = job.whole(step=0)
    watching = job.observes(state)
    job.optimizer.inner = torch.optim.SGD(job.model.parameters(), lr=0.0)
    job.optimizer.inner.step()
    job.optimizer.inner = torch.optim.SGD(job.model.parameters(), lr=0.0)
    watching.begin()
    job.optimizer.inner.step()
    job.train(state)
    assert reported(watching) == set()


def test_stream_with_its_own_state_has_a_position(job):
    stream = Resuming()
    state = job.whole(step=0, stream=stream)
    watching = job.observes(state)
    job.batches = iter(torch_data.DataLoader(stream, batch_size=2))
    job.train(state)
    assert reported(watching) == set()


def test_scheduler_created_during_training_is_unchanged(job):
    state = job.whole(step=0)
    watching = job.observes(state)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 5)
    job.train(state)
    assert scheduler.last_epoch == 0
    assert reported(watching) == set()


class Kept(torch_data.Sampler[int]):
    def __init__(self) -> None:
        self.rank, self.num_replicas = 0, 1

    def __iter__(self):
        return iter(range(self.rank, 500, self.num_replicas))


class Subclass(torch_data.DistributedSampler[Any]):
    """Follows the world like torch's sampler."""


class Stream(torch_data.IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter([(torch.ones(2),)] * 500)


def loaders(job: Job) -> dict[str, object]:
    ours = data.DataLoader(job.samples, batch_size=2)
    sampler = data.ElasticSampler(job.samples)
    placed: Any = torch_data.DistributedSampler(job.samples, num_replicas=1, rank=0)
    following: Any = Subclass(job.samples, num_replicas=1, rank=0)
    elsewhere: Any = Subclass(job.samples, num_replicas=2, rank=1)
    by_ours = torch_data.DataLoader(job.samples, batch_size=2, sampler=sampler)
    return {
        "torch": torch_data.DataLoader(job.samples, batch_size=2),
        "distributed": torch_data.DataLoader(job.samples, batch_size=2, sampler=placed),
        "following": torch_data.DataLoader(job.samples, batch_size=2, sampler=following),
        "elsewhere": torch_data.DataLoader(job.samples, batch_size=1, sampler=elsewhere),
        "stream": torch_data.DataLoader(Stream(), batch_size=2),
        "kept": torch_data.DataLoader(job.samples, batch_size=2, sampler=Kept()),
        "ours": ours,
        "ours in the state": ours,
        "sampler": by_ours,
        "sampler in the state": by_ours,
    }


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("torch", {Kind.LOADER_WITHOUT_POSITION}),
        pytest.param("distributed", {Kind.LOADER_WITHOUT_POSITION}, marks=pytest.mark.nightly),
        pytest.param("following", {Kind.LOADER_WITHOUT_POSITION}, marks=pytest.mark.nightly),
        ("elsewhere", {Kind.RANK_KEPT}),
        pytest.param("stream", {Kind.LOADER_WITHOUT_POSITION}, marks=pytest.mark.nightly),
        pytest.param("kept", {Kind.RANK_KEPT}, marks=pytest.mark.nightly),
        ("ours", {Kind.LOADER_NOT_IN_STATE}),
        ("ours in the state", set()),
        pytest.param("sampler", {Kind.LOADER_NOT_IN_STATE}, marks=pytest.mark.nightly),
        pytest.param("sampler in the state", set(), marks=pytest.mark.nightly),
    ],
)
def test_only_the_loader_of_the_training_steps_is_checked(job, following, case, kinds):
    loader = loaders(job)[case]
    member = getattr(loader, "sampler", loader) if case.startswith("sampler") else loader
    state = job.whole(step=0, **({"loader": member} if "in the state" in case else {}))
    evaluation = torch_data.DataLoader(job.samples, batch_size=100)
    watching = job.observes(state)
    job.batches = iter(loader)  # type: ignore[call-overload]
    for _ in range(4):
        job.train(state, STEPS // 4)
        for _ in evaluation:
            pass
    assert reported(watching) == kinds


def test_script_that_counts_its_batches_has_a_position(job):
    state = job.whole(epoch=0, batch=0)
    watching = job.observes(state)
    job.batches = iter(torch_data.DataLoader(job.samples, batch_size=2))
    job.train(state)
    assert reported(watching) == set()


def per_epoch(state) -> None:
    state.commit()


def without(state) -> None: ...


def test_missing_commit_is_reported_immediately_unless_one_may_follow(job, monkeypatch):
    monkeypatch.setattr(source_analysis, "script_files", lambda modules: [])
    state = job.whole(step=0)
    for function, expected in ((per_epoch, set()), (without, {Kind.NO_COMMIT})):
        watching = job.observes(state, function)
        job.train(state, commit=False)
        assert reported(watching) == expected


def test_script_is_checked_again_after_a_loss_and_each_kind_is_reported_once(job, capsys):
    sampler = data.ElasticSampler(job.samples)
    state = job.whole(step=0, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 5)
    watching = job.observes(state, per_epoch)
    job.batches = iter(torch_data.DataLoader(job.samples, sampler=sampler))
    job.train(state, commit=False)
    assert reported(watching) == {Kind.SCHEDULER_NOT_IN_STATE}
    watching.recovered()
    assert reported(watching) == {Kind.SCHEDULER_NOT_IN_STATE, Kind.NO_COMMIT}
    watching.begin()
    other = torch.optim.Adam(job.model.parameters())
    job.optimizer = other
    job.train(state)
    assert reported(watching) == {
        *(Kind.SCHEDULER_NOT_IN_STATE, Kind.NO_COMMIT),
        Kind.OPTIMIZER_NOT_IN_STATE,
    }
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert scheduler.last_epoch == 0


def test_strict_raises_in_the_step(job, monkeypatch):
    monkeypatch.setattr(job.rt, "env", replace(job.rt.env, strict=True))
    state = ObjectState(step=0)
    job.observes(state)
    with pytest.raises(ScriptMistakes):
        job.train(state)


def test_loader_is_not_kept_alive_after_the_check(job):
    state = job.whole(step=0)
    job.observes(state)
    loader = torch_data.DataLoader(job.samples, batch_size=2)
    job.batches = iter(loader)
    job.train(state)
    gone = weakref.ref(job.batches)
    job.batches = iter(())
    assert gone() is None


@pytest.mark.parametrize(
    "case",
    [
        "torch",
        *(pytest.param(c, marks=pytest.mark.nightly) for c in ("following", "ours in the state")),
    ],
)
def test_recovery_after_the_check_reports_no_new_mistake(job, following, case):
    loader = loaders(job)[case]
    state = job.whole(step=0, **({"loader": loader} if "in the state" in case else {}))
    watching = job.observes(state)
    job.batches = iter(loader)  # type: ignore[call-overload]
    job.train(state, STEPS + 5)
    before = set(reported(watching))
    watching.recovered()
    assert reported(watching) == before


def seen_after(job: Job, monkeypatch, collective) -> set[Kind]:
    """One of two ranks, each of which calls ``collective`` in a step."""
    monkeypatch.setattr(
        type(job.rt), "place", property(lambda self: Place(0, 2, 0, 2, 0, 1)), raising=True
    )
    state = job.whole(step=0)
    watching = job.observes(state)
    moved_tensors.took_elements(10**6)  # as in a broadcast of the model before the first step
    for _ in range(STEPS):
        job.train(state, 1)
        job.rt.activity += 1
        collective()
    return reported(watching)


def test_single_reduced_loss_does_not_count_as_reduced_gradients(job, monkeypatch):
    assert seen_after(job, monkeypatch, lambda: moved_tensors.took([torch.ones(())])) == {
        Kind.ONLY_LOSS_REDUCED
    }


def test_packed_gradients_are_recognized(job, monkeypatch):
    gradients = torch.ones(3)
    assert seen_after(job, monkeypatch, lambda: moved_tensors.took([gradients])) == set()


def test_tensors_are_measured_only_while_a_script_is_checked(job):
    def largest() -> int | None:
        return moved_tensors.largest

    assert largest() is None
    state = job.whole(step=0)
    job.observes(state)
    job.train(state, STEPS - 1)
    assert largest() == 0
    job.train(state, 1)
    assert largest() is None


def test_objects_are_searched_before_the_world_is_entered(job):
    """Other ranks wait for a worker that has entered a world: the search takes longer than a step."""
    state = job.whole(step=0)
    watching = ScriptObserver(job.rt, state, job.train)
    job.observers.append(watching)
    watching.meet()
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 5)
    watching.begin()
    job.train(state)
    assert reported(watching) == set()
    assert scheduler.last_epoch == 0


def test_mistake_when_found_then_the_driver_receives_its_kind(job, monkeypatch):
    sent: list[MistakeFound] = []
    monkeypatch.setattr(job.rt.session, "send", sent.append)
    state = TorchState(model=job.model, step=0)
    observer = job.observes(state)
    job.train(state)
    told = [each for each in sent if isinstance(each, MistakeFound)]
    assert [each.kind for each in told] == [each.value for each in reported(observer)]
    assert Kind.OPTIMIZER_NOT_IN_STATE in reported(observer)
