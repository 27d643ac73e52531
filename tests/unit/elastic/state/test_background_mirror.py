"""Commits of a sharded state whose copies are sent to another host while training continues."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.collectives.interface import Collectives, Work
from elastic.errors import CollectiveFailed
from elastic.runtime import lifecycle
from elastic.runtime.commit_log import CommitLog
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.sharding.row_layout import rows_of
from elastic.sharding.shard_division import Division
from elastic.sharding.shard_inventory import CommitId
from elastic.state.fully_sharded import peer_arena, sharded_commits
from elastic.state.fully_sharded.shard_buffers import ShardBuffers
from elastic.state.fully_sharded.sharded_commits import ShardedCommits, WorldInventory
from elastic.state.fully_sharded.sharded_handlers import LiveShard, RowSpec
from elastic.state.snapshots.snapshot import Snapshot

SPEC = RowSpec((6, 2), torch.float32)


class Part:
    """A tensor of six rows, of which this rank has those of its shard."""

    name = "model"
    everywhere = True
    position = None

    def __init__(self) -> None:
        self.local = torch.zeros(0, 2)

    def live_shards(self) -> dict[str, LiveShard]:
        return {"weight": LiveShard(self.local, SPEC)}

    def recognized(self, key: str, spec: RowSpec) -> RowSpec:
        return spec

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        self.local = torch.zeros(len(rows_of(6, division.shard, division.shards)), 2)
        return {"weight": self.local}

    def device_of(self, key: str) -> torch.device:
        return self.local.device

    def place_shards(self, found: dict[str, tuple[RowSpec, torch.Tensor]]) -> None:
        pass

    def abandon_pass(self) -> None:
        pass


class OptimizerPart(Part):
    """Optimizer of a model on another device than `Part`. It has no entries yet."""

    name = "optimizer"

    def live_shards(self) -> dict[str, LiveShard]:
        return {}

    def follow(self, division: Division) -> dict[str, torch.Tensor]:
        return {}

    def device_of(self, key: str) -> torch.device:
        return torch.device("meta")


class TwoHosts:
    """Rank 0 of two on two hosts. The other rank has what this one has, and its copies arrive when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arriving: list[Any] = []
        self.barriers = 0
        self.group = create_autospec(Collectives, instance=True, rank=0, size=2)
        self.group.allgather.side_effect = self._allgather
        self.group.alltoall.side_effect = self._alltoall
        self.group.barrier.side_effect = self._barrier
        self.rt = create_autospec(WorkerRuntime, instance=True)
        self.rt.group.return_value = self.group
        self.rt.guard.side_effect = lambda name: contextlib.nullcontext()
        self.rt.commits = create_autospec(CommitLog, instance=True)
        self.rt.place.rank, self.rt.place.size, self.rt.generation = 0, 2, 1
        self.rt.env = SimpleNamespace(digest_commits=False, worker=SimpleNamespace(host="a"))
        monkeypatch.setattr(lifecycle, "active", lambda: self.rt)
        self.part = Part()
        self.commits = ShardedCommits(lambda: [self.part], copies=1)
        met = WorldInventory([(), ()], ("a", "b"), {}, [False, False], [None, None])
        self.commits.divide(self.rt, met, {"model/weight": SPEC})

    @staticmethod
    def _work(done: bool) -> Any:
        work = create_autospec(Work, instance=True)
        work.done.return_value = done
        return work

    def _allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        for output in outputs:
            output.copy_(tensor)
        return self._work(True)

    def _alltoall(self, output: Any, tensor: Any, received: Any, sent: Any) -> Any:
        work = self._work(False)
        self.arriving.append(work)
        return work

    def _barrier(self) -> Any:
        self.barriers += 1
        return self._work(True)

    def commit(self, value: float) -> None:
        def save(_: dict[str, Snapshot]) -> float:
            self.part.local.fill_(value)
            return value

        self.commits.commit(save)

    def sealed(self) -> Any:
        base = self.commits.base()
        return None if base is None else base.values

    def held(self) -> dict[int, bool]:
        """Whether each commit that the next world learns of is mirrored, by number."""
        met = self.commits.meet(self.rt)
        return {each.commit.number: each.mirrored for each in met.inventories[0]}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> TwoHosts:
    return TwoHosts(monkeypatch)


def test_commit_returns_before_its_copy_has_arrived(two: TwoHosts):
    two.commit(1.0)
    assert len(two.arriving) == 1 and not two.arriving[0].wait.called
    assert two.sealed() is None and two.barriers == 0


def test_next_commit_waits_for_the_copy_and_seals_before_writing(two: TwoHosts):
    two.commit(1.0)
    two.commit(2.0)
    assert two.arriving[0].wait.called and two.barriers == 1
    assert two.sealed() == 1.0
    assert not two.arriving[1].wait.called


def test_commit_that_is_finished_is_sealed_once(two: TwoHosts):
    two.commit(1.0)
    two.commits.seal()
    two.commits.seal()
    assert two.sealed() == 1.0 and two.barriers == 1


def test_failed_copy_leaves_the_sealed_buffer_unchanged(two: TwoHosts):
    two.commit(1.0)
    two.commit(2.0)
    two.arriving[1].wait.side_effect = CollectiveFailed("a peer is lost")
    with pytest.raises(CollectiveFailed):
        two.commit(3.0)
    assert two.sealed() == 1.0
    assert two.held() == {0: True, 1: False}


@pytest.mark.parametrize("arrived", [False, True])
def test_broken_world_counts_a_copy_only_when_arrived(two: TwoHosts, arrived: bool):
    two.commit(1.0)
    two.commit(2.0)
    two.arriving[1].done.return_value = arrived
    assert two.held() == {0: True, 1: arrived}


def test_copy_whose_group_was_aborted_does_not_count(two: TwoHosts):
    two.commit(1.0)
    two.commit(2.0)
    two.arriving[1].done.return_value = True
    two.arriving[1].wait.side_effect = CollectiveFailed("aborted")
    assert two.held() == {0: True, 1: False}


def test_commit_that_ranks_disagree_on_is_not_sealed_later(
    two: TwoHosts, monkeypatch: pytest.MonkeyPatch
):
    two.commit(1.0)
    monkeypatch.setattr(
        sharded_commits.ShardedCommits,
        "_compare",
        lambda *_, **__: (_ for _ in ()).throw(CollectiveFailed("differs")),
    )
    with pytest.raises(CollectiveFailed):
        two.commit(2.0)
    two.commits.seal()
    assert two.sealed() == 1.0


def test_optimizer_entries_are_received_on_the_device_of_their_parameters(two: TwoHosts):
    parts = [Part(), OptimizerPart()]
    met = WorldInventory([(), ()], ("a", "b"), {}, [False, False], [None, None])
    found = ShardedCommits(lambda: parts, copies=1).divide(
        two.rt, met, {"model/weight": SPEC, "optimizer/0.exp_avg": SPEC}
    )
    assert {name: each.device.type for name, (_, each) in found.items()} == {
        "model/weight": "cpu",
        "optimizer/0.exp_avg": "meta",
    }


# ---- copies from a GPU ---------------------------------------------------------------------------------------------


class CopyInFlight:
    """Stands for a `BackgroundCopy`: complete once `order` was called."""

    def __init__(self, valid: bool) -> None:
        self.valid = valid
        self.exposed = False
        self.ordered = threading.Event()

    def order(self) -> None:
        self.ordered.set()

    def finish(self) -> bool:
        assert self.ordered.wait(20.0)
        return self.valid


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[CopyInFlight]:
    """Those of the next commits, which then are in flight."""
    coming: list[CopyInFlight] = []
    copied = ShardBuffers.copy

    def copy(bank: ShardBuffers, shards: Any, commit: CommitId, *, exposed: bool = False) -> int:
        nbytes = copied(bank, shards, commit)
        if coming:
            peer_arena.mark(bank._own, None, bank.shard)
            coming[0].exposed = exposed
            monkeypatch.setattr(bank, "_copying", (coming.pop(0), commit))
        return nbytes

    monkeypatch.setattr(ShardBuffers, "copy", copy)
    return coming


def test_copy_from_a_gpu_is_sent_and_sealed_once_complete(two: TwoHosts, copies):
    copies.append(CopyInFlight(valid=True))
    two.commit(1.0)
    assert not two.arriving and two.sealed() is None
    two.commit(2.0)
    assert two.arriving[0].wait.called and two.sealed() == 1.0


def test_copy_written_to_by_the_script_is_dropped_and_later_ones_are_not_exposed(
    two: TwoHosts, copies, capsys
):
    two.commit(1.0)
    first, second = CopyInFlight(valid=False), CopyInFlight(valid=True)
    copies += [first, second]
    two.commit(2.0)
    two.commit(3.0)
    assert first.exposed and not second.exposed
    assert two.sealed() == 1.0 and capsys.readouterr().err
    assert len(two.arriving) == 1
    two.commits.seal()
    assert two.sealed() == 3.0 and not two.commits.discarded


@pytest.mark.parametrize("valid", [True, False])
def test_broken_world_counts_a_copy_from_a_gpu_only_when_valid(two: TwoHosts, copies, valid: bool):
    two.commit(1.0)
    copies.append(CopyInFlight(valid))
    two.commit(2.0)
    two.group.allreduce.side_effect = CollectiveFailed("a peer is lost")
    assert sorted(two.held()) == ([0, 1] if valid else [0])
    assert two.sealed() == 1.0


def test_copy_from_a_gpu_is_ordered_before_a_checkpoint_reads_its_buffer(two: TwoHosts, copies):
    copy = CopyInFlight(valid=True)
    copies.append(copy)
    two.commit(1.0)
    held = SimpleNamespace(parts={"model": SimpleNamespace(sharded={})}, release_shard=None)
    two.commits.hold(held)  # type: ignore[arg-type]
    assert copy.ordered.is_set()
