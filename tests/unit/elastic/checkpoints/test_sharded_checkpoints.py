"""Commits of sharded states in a folder: each rank writes rows, and ranks of any number read the rows they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elastic.checkpoints import catalog, commit_files, state_restoring
from elastic.checkpoints.files import row_ranges, row_reader
from elastic.checkpoints.files.manifest import CommitName, Manifest, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.shard_reader import read_rows, row_specs
from elastic.sharding.row_layout import rows_of
from elastic.state.torch_state import TorchState
from harness.sharded_writing import share_of, written_by

NAME = CommitName(1, 2, 30)


def trained(seed: int, steps: int = 3) -> TorchState:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(10, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 10, bias=False)
    )
    net[2].tied = net[0].bias
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 10)).square().sum().backward()
        optimizer.step()
    state = TorchState(model=net, optimizer=optimizer, step=seed, best={"a": (1, 0.5)})
    state.commit()
    return state


def read_by(storage: Storage, found: Manifest, size: int) -> dict[str, torch.Tensor]:
    """What so many ranks read, put together."""
    specs = row_specs(found.tensors)
    whole = {name: torch.full(each.shape, 77, dtype=each.dtype) for name, each in specs.items()}
    for rank in range(size):
        wanted = {name: rows_of(len(each), rank, size) for name, each in whole.items()}
        targets = {n: (rows, whole[n][rows.begin : rows.end]) for n, rows in wanted.items()}
        read_rows(storage, found, targets)
    return whole


def parameters(state: TorchState) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": each for name, each in state.model.named_parameters()}
    for number, each in enumerate(state.model.parameters()):
        for key, entry in state.optimizer.state[each].items():
            if entry.dim():
                found[f"optimizer/{number}.{key}"] = entry
    return found


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 1), (4, 2), (2, 3), (9, 4)])
def test_rows_of_any_number_of_ranks_are_read_by_any_other(
    tmp_path: Any, writers: int, readers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_ranges, "PIECE", 50)  # a row, or some
    storage, state = Storage(str(tmp_path)), trained(2)
    found = written_by(storage, state, NAME, writers)
    assert found.sharded
    assert catalog.verify(storage, found) == ""
    whole, right = read_by(storage, found, readers), parameters(state)
    assert whole.keys() == right.keys()
    assert all(torch.equal(whole[name], right[name]) for name in right)


def test_replicated_tensors_and_values_are_loaded_from_a_sharded_checkpoint(tmp_path: Any):
    storage, state = Storage(str(tmp_path)), trained(2)
    found = written_by(storage, state, NAME, 3)
    other = trained(7)
    weight = other.model[0].weight.detach().clone()
    state_restoring.load(storage, found, other)
    assert torch.equal(other.model[1].running_mean, state.model[1].running_mean)
    assert (other.step, other.best) == (state.step, state.best)
    assert torch.equal(other.model[0].weight, weight), "rows are read by `read_rows`"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_converts_a_sharded_checkpoint_without_elastic(tmp_path: Any):
    storage, state = Storage(str(tmp_path / "all")), trained(2)
    written_by(storage, state, NAME, 3)
    dcp_to_torch_save(tmp_path / "all" / str(NAME), tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    other = trained(7)
    other.model.load_state_dict(plain["model"])
    theirs = state.model.state_dict()
    assert all(torch.equal(each, theirs[key]) for key, each in other.model.state_dict().items())
    entry = state.optimizer.state[state.model[0].weight]["exp_avg"]
    assert torch.equal(plain["optimizer"]["state"]["0"]["exp_avg"], entry)


def test_a_checkpoint_without_some_rows_is_not_sealed(tmp_path: Any):
    storage, state = Storage(str(tmp_path)), trained(2)
    for rank, writer in enumerate((0, 1, 1)):  # rows of the third are nowhere
        held = share_of(state, writer, 3)
        commit_files.write_share(storage, NAME, held, rank, 3, lambda: None)
        held.release()
    held = share_of(state, 0, 3)
    with pytest.raises(UnreadableCommit):
        commit_files.seal(storage, NAME, held, 3, lambda: None)
    assert catalog.entry(storage, NAME).torn


@pytest.mark.parametrize("damage", ["flip", "short", "gone"])
def test_corrupted_rows_are_found_only_by_the_rank_that_reads_them(tmp_path: Any, damage: str):
    storage, state = Storage(str(tmp_path)), trained(2)
    found = written_by(storage, state, NAME, 2)
    file = tmp_path / str(NAME) / "__1_2.distcp"
    content = bytearray(file.read_bytes())
    tensor = next(
        each for each in found.tensors if each.key == "0.weight" and each.file == file.name
    )
    assert tensor.rows is not None
    match damage:
        case "flip":
            content[tensor.rows.data + 3] ^= 4
            file.write_bytes(content)
        case "short":
            file.write_bytes(content[: tensor.rows.data + 5])
        case "gone":
            file.unlink()
    ranges = [each for each in found.tensors if each.key == "0.weight"]
    for rank in range(2):
        rows = rows_of(7, rank, 2)
        into = torch.zeros(len(rows), 10)
        if rank == 0:
            row_reader.read(storage, str(NAME), ranges, rows, into)
            assert torch.equal(into, state.model[0].weight[:4])
        else:
            with pytest.raises(UnreadableCommit):
                row_reader.read(storage, str(NAME), ranges, rows, into)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_each_rank_reports_which_of_its_rows_are_not_finite(tmp_path: Any, odd: float):
    state = trained(2)
    with torch.no_grad():
        state.model[0].weight[6, 3] = odd
    state.commit()
    found = []
    for rank in range(2):
        held = share_of(state, rank, 2)
        found.append(commit_files.not_finite(held))
        held.release()
    assert found == [set(), {"model.0.weight"}]
