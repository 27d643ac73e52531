"""Reading the checkpoint to begin with, and waiting for the last one, is time that goes to the storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.checkpoints import newest_checkpoint, options, training_checkpoints
from elastic.checkpoints.background_writer import CheckpointWriter
from elastic.checkpoints.files.manifest import CommitName, Manifest
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.training_checkpoints import TransferOutcome
from elastic.monitoring.time_account import TimeAccount
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.protocol.messages import Address, CheckpointWritten, Commit, Place, World
from elastic.rendezvous import worker_settings
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.commit_log import CommitLog
from elastic.runtime.session import Session
from elastic.runtime.training_reports import Training
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.sharding.shard_inventory import CommitId, HeldShard
from elastic.state.fully_sharded.sharded_commits import ShardedCommits, WorldInventory
from elastic.state.state import ObjectState, State


@pytest.fixture
def rt():
    made = create_autospec(WorkerRuntime, instance=True)
    made.account = TimeAccount(0.0, "joining")
    made.alone = True
    return made


def test_reading_a_checkpoint_is_booked_as_storage(rt, monkeypatch, tmp_path):
    during: list[str] = []
    monkeypatch.setenv(options.DIR, str(tmp_path))
    monkeypatch.setattr(
        training_checkpoints, "_resume", lambda rt, *rest: during.append(rt.account.part)
    )
    training_checkpoints.resume(rt, ObjectState(step=0))
    assert (during, rt.account.part) == (["storage"], "joining")


def test_reading_the_first_checkpoint_is_a_long_phase(rt, monkeypatch, tmp_path):
    phases: list[str] = []
    seen: list[list[str]] = []

    @contextlib.contextmanager
    def long_phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield
        phases.remove(name)

    rt.alone, rt.place = False, Place(0, 1, 0, 1, 0, 1)
    rt.training = create_autospec(Training, instance=True)
    rt.training.long_phase.side_effect = long_phase
    monkeypatch.setenv(options.DIR, str(tmp_path))
    monkeypatch.setattr(newest_checkpoint, "load_newest", lambda *_: seen.append([*phases]))
    training_checkpoints.resume(rt, ObjectState(step=0))
    assert (seen, phases) == ([["reading the checkpoint"]], [])


def test_waiting_for_the_last_checkpoint_is_booked_as_storage(rt):
    during: list[str] = []

    class Commits:
        durable: Any = object()

        def finish(self, state: Any) -> None:
            during.append(rt.account.part)

    rt.commits = Commits()
    training_checkpoints.finish(rt, ObjectState(step=0))
    assert (during, rt.account.part) == (["storage"], "joining")


def test_commit_and_step_back_are_forwarded_to_the_checkpoint_writer():
    session = Session(worker_settings.read({}), None)
    log = CommitLog(session, create_autospec(ProgressCounter, instance=True))
    writer = log.durable = create_autospec(CheckpointWriter, instance=True)
    log.committed()
    writer.saved.assert_called_once_with()
    log.step_back(create_autospec(ObjectState, instance=True))
    writer.stepped_back.assert_called_once_with()


@pytest.mark.parametrize(("holders", "rank", "knows"), [(2, 1, True), (2, 2, False), (0, 1, False)])
def test_digest_of_non_finite_gradients_is_forgotten_when_the_state_is_replaced(
    rt, holders, rank, knows
):
    rt.commits = create_autospec(CommitLog, instance=True)
    rt.commits.durable = create_autospec(CheckpointWriter, instance=True)
    first = rt.first_not_finite = FirstNotFinite()
    first.look("0", [torch.tensor(torch.nan)], [("weight", torch.ones(2))])
    place, commit = Place(rank, 3, rank, 3, 0, 1), Commit(2, 7) if holders else None
    training_checkpoints.entered(rt, World(3, place, Address("h", 1), holders, commit, "lost h:1"))
    assert (first.digest() is not None) == knows


MEMORY, START = CommitId(3, 5), CommitId(0, 1)


@pytest.mark.parametrize(
    ("commit", "folder", "there", "reads"),
    [
        (MEMORY, True, True, False),
        (None, True, True, True),
        (START, True, True, True),
        (None, True, False, False),
        (START, True, False, False),
        (None, False, True, False),
    ],
    ids=["whole", "lost", "untrained", "no checkpoint", "first start", "no folder"],
)
def test_checkpoint_is_read_when_ranks_hold_no_whole_commit(
    rt, monkeypatch, tmp_path, commit, folder, there, reads
):
    held = () if commit is None else (HeldShard(commit, 1, 0, True),)
    met = WorldInventory([held], ("h",), {}, [False], [None])
    sharded = create_autospec(ShardedCommits, instance=True)
    sharded.meet.return_value, sharded.placed = met, None
    state = create_autospec(State, instance=True)
    state.bring_shards.return_value = 12
    monkeypatch.setattr(training_checkpoints, "shards_of", lambda _: sharded)
    monkeypatch.setattr(training_checkpoints, "_resume_shards", lambda *_: there)
    if folder:
        monkeypatch.setenv(options.DIR, str(tmp_path))
    reset = create_autospec(callable)
    found = training_checkpoints.bring_shards(rt, state, reset)
    assert found == TransferOutcome(0 if reads else 12, reads, sharded.placed)
    if not reads:
        state.bring_shards.assert_called_once_with(reset, met)


@pytest.mark.parametrize(("run", "reported"), [(3, True), (2, False)])
def test_restored_commit_is_reported_only_within_the_same_run(run, reported):
    """Numbers of commits begin anew in each run."""
    name = CommitName(run, 2, 20)
    manifest = create_autospec(Manifest, instance=True, values={"step": 17}, bytes=10)
    manifest.name = name
    sent: list[Any] = []
    newest_checkpoint.report(manifest, "/c", CheckpointOptions("/c", run=3), sent.append)
    wanted = CheckpointWritten(2, 0, Commit(2, 20), f"/c/{name}", 10, 0.0, 17)
    assert sent == ([wanted] if reported else [])
