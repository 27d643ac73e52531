"""A commit goes to a folder in shares and comes back, bit for bit; what is torn or damaged is never taken."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys

import fsspec
import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from elastic.checkpoints import catalog, commit_files, newest_checkpoint, state_restoring
from elastic.checkpoints.files import manifest
from elastic.checkpoints.files.manifest import CommitName, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions
from elastic.errors import Invalid, StateMismatch
from elastic.exact.shards import Shards
from elastic.state.handlers.part import ShardsStateHandler
from elastic.state.sampler import ElasticSampler
from elastic.state.state import hold
from elastic.state.torch_state import TorchState
from harness.golden import raises, recorded


def trained(seed: int, steps: int = 3, width: int = 20) -> TorchState:
    torch.manual_seed(seed)
    random.seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(10, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 10)
    )
    net[2].tied = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 10)).square().sum().backward()
        optimizer.step()
        schedule.step()
    sampler = ElasticSampler(range(50))
    state = TorchState(
        model=net, optimizer=optimizer, schedule=schedule, sampler=sampler, rng=True, epoch=seed, best={"a": (1, 0.5)}
    )  # fmt: skip
    state.commit()
    return state


def nobody_minds() -> None:
    pass


def written(
    storage: Storage, state: TorchState, name: CommitName, size: int = 1
) -> manifest.Manifest:
    held = hold(state)
    try:
        for rank in range(size):
            commit_files.write_share(storage, name, held, rank, size, nobody_minds)
        return commit_files.seal(storage, name, held, size, nobody_minds)
    finally:
        held.release()


def same(one: TorchState, other: TorchState) -> bool:
    mine, theirs = one.optimizer.state_dict(), other.optimizer.state_dict()
    entries = all(
        torch.equal(entry, theirs["state"][number][key])
        for number, entries in mine["state"].items()
        for key, entry in entries.items()
    )
    models = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return (
        entries
        and mine["param_groups"] == theirs["param_groups"]
        and all(torch.equal(a, b) for a, b in models)
        and one.schedule.state_dict() == other.schedule.state_dict()
        and (one.epoch, one.best) == (other.epoch, other.best)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_checkpoint_of_any_number_of_ranks_loads_bit_for_bit(tmp_path, size):
    storage, state = Storage(str(tmp_path)), trained(2)
    drawn = torch.randn(3), random.random()
    state.restore()  # the generators are where they were at the commit
    found = written(storage, state, CommitName(1, 2, 30), size)
    assert found.pickled == [] and catalog.verify(storage, found) == ""
    other = trained(7, steps=1)
    state_restoring.load(storage, catalog.read(storage, CommitName(1, 2, 30)), other)
    state_restoring.load_random(found.generators, size - 1, other)
    assert same(other, state)
    assert torch.equal(torch.randn(3), drawn[0]) and random.random() == drawn[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_checkpoint_without_this_package(tmp_path):
    storage, state = Storage(str(tmp_path / "all")), trained(2)
    written(storage, state, CommitName(1, 2, 30), size=3)
    folder = tmp_path / "all" / "r0001-g0002-c00000030"
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    other = trained(7)
    other.model.load_state_dict(plain["model"])
    assert torch.equal(other.model[0].weight, state.model[0].weight) and plain["epoch"] == 2
    into = {"optimizer": other.optimizer.state_dict(), "epoch": 0}
    dcp_load(into, checkpoint_id=folder, no_dist=True)
    other.optimizer.load_state_dict(into["optimizer"])
    entry = state.optimizer.state[state.model[0].weight]["exp_avg"]
    assert torch.equal(other.optimizer.state[other.model[0].weight]["exp_avg"], entry)


def test_keys_with_equal_text_are_distinguished(tmp_path):
    """torch.distributed.checkpoint names values by their keys as text."""
    storage, state = Storage(str(tmp_path)), trained(2)
    state.best = {1: "a", "1": "b", "x": {2: "c", "2": "d"}}
    state.commit()
    found = written(storage, state, CommitName(1, 2, 30))
    other = trained(7)
    state_restoring.load(storage, found, other)
    assert other.best == state.best
    dcp_to_torch_save(str(tmp_path / str(found.name)), str(tmp_path / "all.pt"))
    assert torch.load(tmp_path / "all.pt", weights_only=False)["best"] == state.best


def test_index_of_each_checkpoint_matches_its_values(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    for number, best in enumerate([{"a": 1}, {"a": 2}, {"b": 2}, {"b": 2, "c": "longer"}]):
        state.best, state.epoch = best, number
        state.commit()
        found = written(storage, state, CommitName(1, 2, number))
        dcp_to_torch_save(tmp_path / str(found.name), tmp_path / "all.pt")
        plain = torch.load(tmp_path / "all.pt", weights_only=False)
        assert (plain["best"], plain["epoch"]) == (best, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_parameters_that_are_not_finite_are_found(dtype, odd):
    model = torch.nn.Linear(2, 2)
    for name, last in (("sound", 1.0), ("spoilt", odd)):
        numbers = torch.tensor([0.5, last]).to(dtype)
        model.register_parameter(name, torch.nn.Parameter(numbers, requires_grad=False))
    state = TorchState(model=model)
    state.commit()
    held = hold(state)
    assert commit_files.not_finite(held) == {"model.spoilt"}
    held.release()


def test_held_commit_is_unchanged_by_later_commits(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    before = state.model[0].weight.detach().clone()
    held = hold(state)
    with torch.no_grad():
        state.model[0].weight.add_(1)
    state.epoch = 3
    state.commit()
    commit_files.write_share(storage, CommitName(1, 2, 30), held, 0, 1, nobody_minds)
    found = commit_files.seal(storage, CommitName(1, 2, 30), held, 1, nobody_minds)
    held.release()
    other = trained(7)
    state_restoring.load(storage, found, other)
    assert torch.equal(other.model[0].weight, before) and other.epoch == 2
    state.restore()
    assert state.epoch == 3 and torch.equal(state.model[0].weight, before + 1)


def test_incomplete_checkpoint_is_skipped(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    whole = written(storage, state, CommitName(1, 2, 30))
    held = hold(state)
    commit_files.write_share(storage, CommitName(1, 2, 40), held, 0, 2, nobody_minds)
    with raises(UnreadableCommit):
        commit_files.seal(storage, CommitName(1, 2, 40), held, 2, nobody_minds)
    held.release()
    assert catalog.entry(storage, CommitName(1, 2, 40)).torn
    options = CheckpointOptions(str(tmp_path))
    found = newest_checkpoint.load_newest(storage, options, trained(7))
    assert found is not None and found[1].name == whole.name


@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_flipped_bit_is_found_and_the_previous_checkpoint_is_loaded(tmp_path, capsys, file):
    storage, state = Storage(str(tmp_path)), trained(2)
    written(storage, state, CommitName(1, 2, 30))
    written(storage, state, CommitName(1, 2, 40))
    path = tmp_path / "r0001-g0002-c00000040" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
    found = newest_checkpoint.load_newest(storage, CheckpointOptions(str(tmp_path)), trained(7))
    assert found is not None and found[1].name == CommitName(1, 2, 30)
    recorded("output", capsys.readouterr().err)


def test_unreadable_checkpoints_are_an_error_unless_a_fresh_run_is_requested(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    written(storage, state, CommitName(1, 2, 30))
    (tmp_path / "r0001-g0002-c00000030" / "__0_0.distcp").unlink()
    with raises(Invalid):
        newest_checkpoint.load_newest(storage, CheckpointOptions(str(tmp_path)), trained(7))
    fresh = CheckpointOptions(str(tmp_path), run=2, floor=2)
    assert newest_checkpoint.load_newest(storage, fresh, trained(7)) is None


def test_different_state_is_refused_with_the_difference_and_not_modified(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    found = written(storage, state, CommitName(1, 2, 30))
    other = trained(7, width=30)
    before = other.model[0].weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"model.0.weight float32 \[30, 10\]"):
        state_restoring.load(storage, found, other)
    assert torch.equal(other.model[0].weight, before)


def test_worker_with_different_arithmetic_resumes_only_when_allowed(tmp_path, monkeypatch):
    def state() -> TorchState:
        return TorchState(model=torch.nn.Linear(2, 1), shards=Shards(2))

    monkeypatch.setattr("elastic.exact.arithmetic_probe.lines", lambda: ["arithmetic.threads 1"])
    storage, first = Storage(str(tmp_path)), state()
    found = written(storage, first, CommitName(1, 2, 30))
    monkeypatch.setattr("elastic.exact.arithmetic_probe.lines", lambda: ["arithmetic.threads 2"])
    with raises(StateMismatch):
        state_restoring.load(storage, found, state())
    monkeypatch.setattr(ShardsStateHandler, "_allowed", lambda self: True)
    other = state()
    state_restoring.load(storage, found, other)
    assert other.shards.inexact_since == 0


def test_checkpoint_of_a_newer_version_is_refused(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    written(storage, state, CommitName(1, 2, 30))
    path = tmp_path / "r0001-g0002-c00000030" / "manifest.json"
    now = b'"format":%d' % manifest.FORMAT
    path.write_bytes(path.read_bytes().replace(now, b'"format":9', 1))
    entry = catalog.entry(storage, CommitName(1, 2, 30))
    assert entry.newer
    recorded("messages", entry.trouble)
    # An older one is no way out: what is newer would be removed in time.
    written(storage, state, CommitName(1, 2, 20))
    with raises(Invalid):
        newest_checkpoint.load_newest(storage, CheckpointOptions(str(tmp_path)), trained(7))


def test_cancelled_checkpoint_writes_no_file(tmp_path):
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    storage, state = Storage(str(tmp_path)), trained(2)
    held = hold(state)
    with pytest.raises(Enough):
        commit_files.write_share(storage, CommitName(1, 2, 30), held, 0, 1, enough)
    held.release()
    assert storage.sizes("r0001-g0002-c00000030") == {}


def test_old_checkpoints_are_pruned_once_newer_ones_are_complete(tmp_path):
    storage, state = Storage(str(tmp_path)), trained(2)
    for number in (10, 20, 30, 40):
        written(storage, state, CommitName(2, 1, number))
    written(storage, state, CommitName(1, 9, 99))  # of another training
    held = hold(state)
    commit_files.write_share(storage, CommitName(2, 1, 50), held, 0, 1, nobody_minds)
    held.release()
    assert catalog.prune(storage, 2, floor=2) == [CommitName(2, 1, 10), CommitName(2, 1, 20)]
    left = [CommitName(1, 9, 99), CommitName(2, 1, 30), CommitName(2, 1, 40), CommitName(2, 1, 50)]
    assert catalog.names(storage) == left
    assert catalog.chosen(storage, "1.40").name == CommitName(2, 1, 40)
    with raises(Invalid):
        catalog.chosen(storage, "7.7")


def test_protocol_without_its_package_is_refused():
    with raises(Invalid):
        Storage("gs://bucket/folder")
    with pytest.raises(Invalid, match="nonsense"):
        Storage("nonsense://folder")


def test_url_with_one_slash_is_refused(tmp_path):
    with raises(Invalid):
        Storage("s3:/bucket/folder")
    for path in ("./s3:/bucket", f"file:{tmp_path}", "a:/b", "runs/12:30"):
        assert Storage(path).local


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="needs s3fs")
def test_s3_timeouts_are_shortened_unless_configured_by_the_user(monkeypatch):
    opened = Storage("s3://bucket/folder")._fs
    assert opened.config_kwargs["connect_timeout"] + opened.config_kwargs["read_timeout"] < 10
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})
    assert not Storage("s3://bucket/other")._fs.config_kwargs, "the user has said how"


def test_fsspec_storage_stores_and_loads_checkpoints():
    storage, state = Storage("memory://checkpoints"), trained(2)
    storage.prove_writable()
    found = written(storage, state, CommitName(1, 2, 30), size=2)
    other = trained(7)
    state_restoring.load(storage, found, other)
    assert same(other, state)
    assert catalog.prune(storage, 1) == []


def test_each_job_on_a_folder_gets_its_own_run_number(tmp_path):
    for storage in (Storage(str(tmp_path / "all")), Storage("memory://claimed")):
        assert [catalog.claim_run(storage) for _ in range(3)] == [1, 2, 3]
        written(storage, trained(2), CommitName(7, 2, 30))
        assert catalog.claim_run(storage) == 8


def test_training_begins_with_a_given_commit_of_another_folder(tmp_path):
    """Both folders are at their first run."""
    old, new = Storage(str(tmp_path / "old")), str(tmp_path / "new")
    written(old, trained(2), CommitName(1, 2, 30))
    options = CheckpointOptions(new, run=1, floor=1, start=(old.url, "2.30"))
    state = trained(7)
    where, found = newest_checkpoint.load_newest(Storage(new), options, state) or ("", None)
    assert where == old.url and found is not None and same(state, trained(2))


def test_other_writer_of_a_folder_is_reported_until_its_exit(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path))
    assert catalog.writing_here(storage) is None
    catalog.claim_run(storage)
    assert catalog.writing_here(storage) is None, "it is ourselves"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(other.pid)
    began_at = process.create_time()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("elastic.checkpoints.catalog.psutil.Process", lambda: process)
        catalog.claim_run(storage)
    found = catalog.writing_here(storage)
    assert found is not None and (found.pid, found.began_at) == (other.pid, began_at)
    assert other.stdin is not None
    other.stdin.close()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert process.status() == psutil.STATUS_ZOMBIE
    assert catalog.writing_here(storage) is None, "it has ended, and is not reaped yet"
    other.wait()
    assert catalog.writing_here(storage) is None
