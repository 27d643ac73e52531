"""A checkpoint as one file: loaded by torch alone, into a model that was never sharded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from elastic.checkpoints import commit_files, exporting
from elastic.checkpoints.exporting import SkippedValue
from elastic.checkpoints.files.manifest import CommitName, Manifest, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline.offline import checkpoints_cli
from elastic.errors import Invalid
from elastic.state.state import hold
from elastic.state.torch_state import TorchState
from harness.golden import raises
from harness.sharded_writing import written_by

NAME = CommitName(1, 2, 30)


class Own:
    """Only pickle can keep it."""


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 7))
    net.append(torch.nn.Linear(7, 7))
    net[3].weight = net[2].weight
    return net


def optimizer_of(net: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [*net[0].parameters()], "lr": 0.1},
        {"params": [*net[2].parameters()]},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def step(net: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(9)
    optimizer.zero_grad()
    net(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()


def trained() -> TorchState:
    net = network(1)
    optimizer = optimizer_of(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        step(net, optimizer)
        schedule.step()
    state = TorchState(
        model=net, optimizer=optimizer, schedule=schedule, step=3, best={1: (2, 0.5)}, own=Own(), some=frozenset({1})
    )  # fmt: skip
    state.commit()
    return state


def replicated(storage: Storage, state: TorchState, name: CommitName, size: int) -> Manifest:
    held = hold(state)
    try:
        for rank in range(size):
            commit_files.write_share(storage, name, held, rank, size, lambda: None)
        return commit_files.seal(storage, name, held, size, lambda: None)
    finally:
        held.release()


KINDS = pytest.mark.parametrize("write", [replicated, written_by])
Write = Callable[..., Manifest]


@KINDS
@pytest.mark.parametrize("size", [1, 3])
def test_exported_checkpoint_loads_into_plain_objects_that_train_equally(
    tmp_path: Any, write: Write, size: int
):
    storage, state = Storage(str(tmp_path)), trained()
    file = str(tmp_path / "all.pt")
    left_out = exporting.export(storage, write(storage, state, NAME, size), file)
    assert left_out == [SkippedValue("own"), SkippedValue("some")]
    found = torch.load(file)  # with weights_only
    assert (found["step"], found["best"]) == (3, {1: (2, 0.5)})
    net = network(2)
    optimizer = optimizer_of(net)
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert net[3].weight is net[2].weight
    step(net, optimizer)
    step(state.model, state.optimizer)
    theirs = state.model.state_dict()
    assert all(torch.equal(each, theirs[key]) for key, each in net.state_dict().items())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    schedule.load_state_dict(found["schedule"])
    assert schedule.last_epoch == 3


@KINDS
def test_optimizer_groups_of_the_manifest_override_the_layout(tmp_path: Any, write: Write):
    storage, state = Storage(str(tmp_path)), trained()
    found = write(storage, state, NAME, 2)
    assert found.group_sizes == {"optimizer": [2, 2]}
    other = msgspec.structs.replace(found, layout=found.layout.replace("groups", "parameters"))
    exported = exporting.whole_state(storage, other).others["optimizer"]
    assert [group["params"] for group in exported["param_groups"]] == [[0, 1], [2, 3]]
    with pytest.raises(UnreadableCommit):
        exporting.whole_state(storage, msgspec.structs.replace(found, group_sizes={}))


@KINDS
def test_safetensors_have_the_models_names(tmp_path: Any, write: Write):
    safetensors = pytest.importorskip("safetensors.torch")
    storage, state = Storage(str(tmp_path)), trained()
    file = str(tmp_path / "all.safetensors")
    exporting.export(storage, write(storage, state, NAME, 2), file)
    net = network(2)
    net.load_state_dict(safetensors.load_file(file))
    theirs = state.model.state_dict()
    assert all(torch.equal(each, theirs[key]) for key, each in net.state_dict().items())


def test_tensor_names_begin_with_the_model_when_several_are_exported(tmp_path: Any):
    safetensors = pytest.importorskip("safetensors.torch")
    storage = Storage(str(tmp_path))
    state = TorchState(one=torch.nn.Linear(2, 2), two=torch.nn.Linear(2, 2, bias=False))
    state.commit()
    file = str(tmp_path / "all.safetensors")
    exporting.export(storage, replicated(storage, state, NAME, 1), file)
    assert {*safetensors.load_file(file)} == {"one.weight", "one.bias", "two.weight"}


def test_export_without_safetensors_or_a_model_is_refused_and_leaves_no_file(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    storage = Storage(str(tmp_path / "all"))
    state = TorchState(step=1)
    state.commit()
    found = replicated(storage, state, NAME, 1)
    with pytest.raises(Invalid):
        exporting.export(storage, found, str(tmp_path / "a.safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(Invalid):
        exporting.export(storage, found, str(tmp_path / "a.safetensors"))
    assert [each.name for each in tmp_path.iterdir()] == ["all"]


class OwnExtra(torch.nn.Linear):
    """Its extra state is pickled, and with it all that is not a tensor of this model."""

    def get_extra_state(self) -> Any:
        return Own()

    def set_extra_state(self, state: Any) -> None:
        pass


@KINDS
def test_tensors_of_a_part_with_pickled_values_are_exported(tmp_path: Any, write: Write):
    storage = Storage(str(tmp_path))
    state = TorchState(model=OwnExtra(3, 4))
    state.commit()
    file = str(tmp_path / "all.pt")
    found = write(storage, state, NAME, 2)
    assert exporting.export(storage, found, file) == [SkippedValue("model", but_tensors=True)]
    assert torch.equal(torch.load(file)["model"]["weight"], state.model.weight)


@KINDS
def test_a_damaged_file_is_not_exported(tmp_path: Any, write: Write):
    storage, state = Storage(str(tmp_path / "all")), trained()
    found = write(storage, state, NAME, 2)
    last = sorted((tmp_path / "all" / str(NAME)).glob("__1*"))[-1]
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    with pytest.raises(UnreadableCommit):
        exporting.export(storage, found, str(tmp_path / "all.pt"))
    assert not (tmp_path / "all.pt").exists()


def test_command_exports_the_newest_or_the_given_commit(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    storage, state = Storage(str(tmp_path / "a@b")), trained()
    written_by(storage, state, NAME, 2)
    state.step = 4
    state.commit()
    replicated(storage, state, CommitName(1, 2, 40), 2)
    (tmp_path / "a@b" / "r0001-g0002-c00000050").mkdir()  # incomplete
    assert checkpoints_cli.main(["export", "a@b"]) == 0
    assert torch.load("r0001-g0002-c00000040.pt")["step"] == 4
    assert checkpoints_cli.main(["export", "a@b@g2c30", "--out", "three.pt"]) == 0
    assert torch.load("three.pt")["step"] == 3
    for wrong in (["export", "a@b"], ["export", "a@b", "--out", "three.pt"]):
        with pytest.raises(Invalid):  # the file exists
            checkpoints_cli.main(wrong)
    assert torch.load("three.pt")["step"] == 3
    assert checkpoints_cli.main(["export", "a@b", "--out", "three.pt", "--force"]) == 0
    assert torch.load("three.pt")["step"] == 4
    for wrong in (["export"], ["export", "nothing"], ["export", "a@b@g9c9"]):
        with pytest.raises(Invalid):
            checkpoints_cli.main(wrong)
    with pytest.raises(Invalid):
        checkpoints_cli.main(["export", "a@b", "--out", "no/such/folder.pt"])


@pytest.mark.parametrize("out", ["all.npz", "all.safetensor", "all", "no/such/folder.pt"])
def test_command_refuses_an_unsupported_file_name_before_reading(tmp_path: Any, out: str):
    with raises(Invalid):
        checkpoints_cli.main(["export", "no folder either", "--out", out])


@pytest.mark.parametrize("file", ["a.PT", "b.pth", "c.bin", "d.ckpt"])
def test_suffixes_of_torch_save_are_accepted(tmp_path: Any, file: str):
    storage, state = Storage(str(tmp_path / "all")), trained()
    exporting.export(storage, replicated(storage, state, NAME, 1), str(tmp_path / file))
    assert torch.load(tmp_path / file)["step"] == 3


def removing(storage: Storage, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Remove the newest checkpoint, as a running job does, just before each of the first reads."""
    read = exporting.whole_state
    left = [*range(times)]

    def whole_state(storage: Storage, found: Manifest) -> exporting.ExportedState:
        if left:
            left.pop()
            storage.remove_file(f"{found.name}/manifest.json")
            storage.remove_folder(str(found.name))
        return read(storage, found)

    monkeypatch.setattr(exporting, "whole_state", whole_state)


def several(folder: Any, count: int) -> Storage:
    storage, state = Storage(str(folder)), trained()
    for number in range(count):
        state.step = number
        state.commit()
        replicated(storage, state, CommitName(1, 2, number), 1)
    return storage


def test_command_exports_the_next_checkpoint_when_the_newest_is_removed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    removing(several(tmp_path / "all", 3), monkeypatch, 1)
    out = str(tmp_path / "out.pt")
    assert checkpoints_cli.main(["export", str(tmp_path / "all"), "--out", out]) == 0
    assert torch.load(out)["step"] == 1


@pytest.mark.parametrize(("which", "count"), [("@g2c2", 3), ("", 7)])
def test_command_fails_when_the_given_checkpoint_or_all_are_removed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, which: str, count: int
):
    removing(several(tmp_path / "all", count), monkeypatch, 5)
    out = str(tmp_path / "out.pt")
    with raises(Invalid):
        checkpoints_cli.main(["export", f"{tmp_path / 'all'}{which}", "--out", out])
    assert [each.name for each in tmp_path.iterdir()] == ["all"]
