"""Ranks, a driver and a storage in one thread: every order of words, writes and deaths that a seed can draw.

The writers are the real ones. Only their threads are gone: what they would do in the background waits in a queue and
is done when it is drawn, as are messages. A commit of step S has a state that can be told from S, so that whatever is
in the storage can be judged at any time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import torch

from elastic.checkpoints import (
    background_writer,
    catalog,
    commit_files,
    state_restoring,
    storage_retries,
)
from elastic.checkpoints.background_writer import CheckpointWriter
from elastic.checkpoints.files.manifest import CommitName, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.schedule import Schedule
from elastic.driver.job.checkpoint_shares import (
    CheckpointCompleted,
    CheckpointShares,
    ReplicaCorrupted,
    ReplicasCorrupted,
    SendToRanks,
)
from elastic.driver.membership.scheduling import rank_order
from elastic.protocol.messages import Commit, Message, SealCheckpoint, Worker
from elastic.state.handlers.held_commit import HeldCommit
from elastic.state.torch_state import TorchState

SIZE = 6
QUICK, SEEDS, ALL_SEEDS = 2, 4, 400  # of make check, of make test, and of make nightly
FOR_EACH_BUG = 20
STEPS = 60
PLACES = ("durable-file", "durable-share", "durable-manifest", "durable-sealed")


def some() -> list[Any]:
    """Seeds, each marked for the runs that have it."""
    quick, night = range(QUICK), range(SEEDS, ALL_SEEDS)
    return [
        *quick,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, SEEDS)),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in night),
    ]


class Dies(BaseException):
    """The process that comes to this place."""


class Rank:
    """One process: a state and a writer whose thread is driven by hand."""

    def __init__(self, job: Job, worker: Worker) -> None:
        self.worker = worker
        self.state = TorchState(model=torch.nn.Linear(SIZE, SIZE, bias=False), step=0)
        self.told: deque[Message] = deque()
        self.says: deque[Message] = deque()
        options = CheckpointOptions(job.url, job.every, None if job.every else 3.0, run=1, keep=2)
        self.writer = CheckpointWriter(Storage(job.url), options, self.says.append, alone=False)
        self.writer._thread = object()  # type: ignore[assignment]

    def at(self, step: int) -> None:
        with torch.no_grad():
            self.state.model.weight.copy_(weights_of(step))
        self.state.step = step


def weights_of(step: int) -> torch.Tensor:
    return torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE) + 1000.0 * step


class Job:
    """Drawn by a seed. ``check`` after each event: whatever has a manifest is whole, and is one commit of history."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn = random.Random(seed)
        self.url = f"memory://simulated-{seed}"
        fsspec.filesystem("memory").store.clear()
        self.storage = Storage(self.url)
        self.every = self.drawn.choice([None, 1, 2, 3, 5])
        self.now = 0.0
        self.step = 0
        self.generation = 0
        self.incarnation = 0
        self.history: dict[Commit, int] = {}
        self.made: set[Commit] = set()
        self.dies_at = ""
        monkeypatch.setattr(background_writer, "monotonic", lambda: self.now)
        monkeypatch.setattr(commit_files, "failpoint", self._reached)
        monkeypatch.setattr(storage_retries, "FIRST_RETRY_S", 0.0)
        self.shares = CheckpointShares()
        self.ranks: list[Rank] = []
        self.world(self.drawn.randint(1, 4))

    def _reached(self, place: str) -> None:
        if place == self.dies_at:
            self.dies_at = ""
            raise Dies

    def world(self, size: int) -> None:
        """Those that live go on, others join with a copy; who is too many leaves."""
        self.generation += 1
        step = self.ranks[0].state.step if self.ranks else self.resumed()
        while len(self.ranks) < size:
            self.incarnation += 1
            self.ranks.append(Rank(self, Worker("h", self.incarnation, 1)))
        del self.ranks[size:]
        self.step = step
        for rank in self.ranks:
            self.brings(rank, step)
            rank.state.commit()
            rank.told.clear()
            rank.writer.world_over(self.generation)
        self.history[Commit(self.generation, 0)] = step
        self.number = 0
        self.places = list(rank_order.places([rank.worker for rank in self.ranks]))
        self.shares.world(self.generation, [rank.worker for rank in self.ranks])

    def brings(self, rank: Rank, step: int) -> None:
        """It holds that step, whatever it had before."""
        rank.at(step)

    def resumed(self) -> int:
        """Everything is gone: training begins where the newest whole checkpoint is."""
        found = self.whole()
        if not found:
            assert not self.made, "what was durable is gone"
            return 0
        newest = max(self.made, default=None)
        step = found[max(found)]
        assert newest is None or step >= self.history[newest], "a durable commit is lost"
        return step

    def whole(self) -> dict[CommitName, int]:
        """Every checkpoint that would be taken, and its step. Fails where one is torn or none of history."""
        found = {}
        for name in catalog.names(self.storage):
            entry = catalog.entry(self.storage, name)
            if entry.manifest is None:
                assert entry.torn, f"{name}: {entry.trouble}"
                continue
            assert catalog.verify(self.storage, entry.manifest) == ""
            other = TorchState(model=torch.nn.Linear(SIZE, SIZE, bias=False), step=0)
            state_restoring.load(self.storage, entry.manifest, other)
            assert torch.equal(other.model.weight, weights_of(other.step)), f"{name} is a mixture"
            assert self.history[name.commit] == other.step, f"{name} holds another commit"
            found[name] = other.step
        return found

    # ---- what may happen -------------------------------------------------------------------------

    def commit(self) -> None:
        self.now += self.drawn.choice([0.01, 0.1, 0.5])
        if self.drawn.random() < 0.05:
            for rank in self.ranks:
                rank.writer.want()
        self.step += 1
        self.number += 1
        self.reduced()
        commit = Commit(self.generation, self.number)
        self.history[commit] = self.step
        for rank, place in zip(self.ranks, self.places, strict=True):
            rank.at(self.step)
            rank.state.commit()
            rank.writer.saved()
            rank.writer.committed(rank.state, commit, place)

    def reduced(self) -> None:
        """The gradients of a step: finite."""

    def hear(self) -> None:
        """The driver hears the next word of a rank."""
        rank = self.drawn.choice(self.ranks)
        if rank.says:
            for action in self.shares.handle(rank.worker, rank.says.popleft()) or ():
                match action:
                    case SendToRanks(workers, message):
                        for each in self.ranks:
                            if each.worker in workers:
                                each.told.append(message)
                    case CheckpointCompleted(commit):
                        self.made.add(commit)
                    case ReplicaCorrupted() | ReplicasCorrupted():
                        self.accused(action)

    def accused(self, action: ReplicaCorrupted | ReplicasCorrupted) -> None:
        raise AssertionError("nobody is damaged")

    def tell(self) -> None:
        rank = self.drawn.choice(self.ranks)
        if rank.told:
            rank.writer.receive(rank.told.popleft())

    def work(self) -> None:
        """One thing that a rank does in the background. It may die of it, and so may all others with it."""
        rank = self.drawn.choice(self.ranks)
        if rank.writer._jobs.empty():
            return
        work = rank.writer._jobs.get()
        assert work is not None
        if self.drawn.random() < 0.06:
            self.dies_at = self.drawn.choice(PLACES)
        try:
            work()
        except Dies:
            self.lose(rank)
        self.dies_at = ""

    def lose(self, rank: Rank) -> None:
        if self.drawn.random() < 0.5:
            self.ranks.clear()  # the power is gone
            self.shares = CheckpointShares()
        else:
            self.ranks.remove(rank)
        self.world(self.drawn.randint(1, 4))

    def another_driver(self) -> None:
        """It has heard nothing of what was said to the one before."""
        self.shares = CheckpointShares()
        self.shares.world(self.generation, [rank.worker for rank in self.ranks])

    def lose_a_connection(self) -> None:
        """And with it what was under way, in both directions."""
        rank = self.drawn.choice(self.ranks)
        rank.told.clear()
        rank.says.clear()

    def run(self) -> None:
        events: list[tuple[float, Callable[[], Any]]] = [
            (6, self.commit),
            (12, self.hear),
            (12, self.tell),
            (12, self.work),
            (0.15, lambda: self.world(self.drawn.randint(1, 4))),
            (0.15, lambda: self.lose(self.drawn.choice(self.ranks))),
            (0.3, self.another_driver),
            (0.3, self.lose_a_connection),
        ]
        weights, ways = zip(*events, strict=True)
        while self.step < STEPS:
            self.drawn.choices(ways, weights)[0]()
            if self.drawn.random() < 0.1:
                self.whole()
        self.whole()

    def settle(self) -> None:
        """All words arrive, and all that waits is written."""
        for _ in range(20 * len(self.ranks)):
            self.hear()
            self.tell()
            for rank in self.ranks:
                while not rank.writer._jobs.empty():
                    work = rank.writer._jobs.get()
                    assert work is not None
                    work()

    def calm(self) -> None:
        """Nothing fails any more, and every word comes in time: checkpoints are made again."""
        before = len(self.made)
        for _ in range(400):
            self.commit()
            self.settle()
            if len(self.made) >= before + 2:
                return
        raise AssertionError("no checkpoint is made any more")


@pytest.mark.parametrize("seed", some())
def test_each_manifest_is_one_complete_commit_and_no_durable_commit_is_lost(seed, monkeypatch):
    job = Job(seed, monkeypatch)
    job.run()
    if seed % 2:
        job.another_driver()
    else:
        job.lose_a_connection()
    job.calm()
    job.ranks.clear()
    job.resumed()


@pytest.mark.slow
def test_most_simulations_write_durable_commits(monkeypatch):
    """A simulation in which nothing is ever written would find nothing."""
    made = []
    for seed in range(4):
        job = Job(seed, monkeypatch)
        job.run()
        made.append(len(job.made))
    assert sum(made) >= 8, made


# ---- gradients of one that are NaN for all ---------------------------------------------------------------------------


class SpoiltJob(Job):
    """At some step a bit of one rank flips, and its gradients are NaN for all, then and in all steps that follow."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: int | None = None  # step with NaN gradients
        self.witnesses: set[Worker] = set()  # of that step
        self.culprit: Worker | None = None  # None: it was the batch
        self.found: ReplicasCorrupted | None = None
        super().__init__(seed, monkeypatch)

    def brings(self, rank: Rank, step: int) -> None:
        super().brings(rank, step)
        if rank.worker.slot > self.known:
            rank.writer.first_not_finite.missed()
        else:
            rank.writer.stepped_back()

    def world(self, size: int) -> None:
        self.known = self.incarnation
        super().world(size)

    def reduced(self) -> None:
        if self.first is None and self.step > 5 and self.made and len(self.ranks) > 1:
            self.first = self.step
            if self.drawn.random() < 0.8:
                self.culprit = self.drawn.choice(self.ranks).worker
        gradients = torch.ones(2) if self.first is None else torch.full((2,), torch.nan)
        for rank in self.ranks:
            flipped = self.step == self.first and rank.worker == self.culprit
            mine = weights_of(self.step) + flipped if self.step == self.first else gradients
            rank.writer.first_not_finite.look("0", [gradients], [("w", mine)])
            if self.step == self.first and rank.writer.first_not_finite.digest() is not None:
                self.witnesses.add(rank.worker)  # no newcomer

    def accused(self, action: ReplicaCorrupted | ReplicasCorrupted) -> None:
        assert isinstance(action, ReplicasCorrupted) and self.culprit is not None, action
        assert action.damaged in ([self.culprit], []), action
        self.found = action

    def seen(self) -> None:
        """Nothing is lost any more."""
        for _ in range(20):
            self.now += 1.0
            self.commit()
            self.settle()


@pytest.mark.parametrize("seed", some())
def test_rank_whose_gradients_corrupted_all_replicas_is_found_after_world_and_driver_changes(
    seed, monkeypatch
):
    job = SpoiltJob(seed, monkeypatch)
    job.world(job.drawn.randint(3, 4))
    while job.first is None:
        for _ in range(20):
            job.drawn.choice([job.hear, job.tell, job.work])()
        if len(job.ranks) < 2:
            job.world(3)
        job.commit()
    for _ in range(job.drawn.randint(0, 3)):
        match job.drawn.randrange(5):
            case 0 | 1:
                job.world(len(job.ranks) + 1)
            case 2:
                job.world(max(len(job.ranks) - 1, 2))
            case 3:
                job.another_driver()
            case 4:
                job.lose_a_connection()
    job.seen()
    left = job.witnesses.intersection(rank.worker for rank in job.ranks)
    if job.culprit in left and len(left) > 1:
        assert job.found is not None
        assert len(left) < 3 or job.found.damaged == [job.culprit]
    elif job.culprit is None:
        assert job.found is None


# ---- bugs that it must find ------------------------------------------------------------------------------------------


def sealed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is to write the manifest as soon as one share is there."""
    handle = CheckpointShares.handle

    def early(self: CheckpointShares, worker: Worker, message: Any) -> Any:
        actions = handle(self, worker, message)
        if type(message).__name__ == "ShareWritten" and actions == []:
            seal = SealCheckpoint(message.generation, message.number)
            return [SendToRanks(self._members[:1], seal)]
        return actions

    monkeypatch.setattr(CheckpointShares, "handle", early)
    monkeypatch.setattr(commit_files, "_share", _any_share)


_one_share = commit_files._share


def _any_share(storage: Storage, name: CommitName, rank: int, size: int) -> Any:
    """... and does not ask whether all are."""
    try:
        return _one_share(storage, name, rank, size)
    except UnreadableCommit:
        return _one_share(storage, name, 0, size)


def not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are copied over what is being written."""
    from elastic.state.snapshots.snapshot import Snapshot

    monkeypatch.setattr(Snapshot, "hold", lambda self: self.bank)
    monkeypatch.setattr(Snapshot, "release", lambda self: None)


def pruned_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest goes instead of the oldest."""
    prune = catalog.prune

    def newest_too(storage: Storage, keep: int, floor: int = 0) -> Any:
        found = prune(storage, keep, floor)
        for name in catalog.names(storage)[-1:]:
            storage.remove_folder(str(name))
        return found

    monkeypatch.setattr(catalog, "prune", newest_too)


def late_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears too late of a commit that is to be written takes a later one, and says nothing."""

    def request(self: Schedule, generation: int, number: int) -> bool:
        self._target = number
        return True

    monkeypatch.setattr(Schedule, "request", request)
    monkeypatch.setattr(commit_files, "_share", _any_share)


def released_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are given free when the share is begun, not when it is written."""
    write = commit_files.write_share

    def early(storage: Storage, name: CommitName, held: HeldCommit, *more: Any) -> None:
        held.release()
        for part in held.parts.values():
            for tensor in part.tensors.values():
                tensor.add_(1)
        write(storage, name, held, *more)

    monkeypatch.setattr(commit_files, "write_share", early)


BUGS = {  # the seed to begin with, since earlier ones do not have what it takes
    sealed_early: 0,
    not_held: 0,
    pruned_too_far: 0,
    late_word_counts: 14,
    released_by_others: 0,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.slow
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    for seed in range(BUGS[bug], BUGS[bug] + FOR_EACH_BUG):
        job = Job(seed, monkeypatch)
        try:
            job.run()
            job.ranks.clear()
            job.resumed()
        except (AssertionError, KeyError, RuntimeError, UnreadableCommit):
            return
    pytest.fail("nobody has noticed")
