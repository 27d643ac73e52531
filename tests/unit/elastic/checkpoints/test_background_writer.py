"""Ranks, each with its writer, bring checkpoints together with the driver's help. All in one process."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.checkpoints import background_writer, catalog, state_restoring, storage_retries
from elastic.checkpoints.background_writer import CheckpointWriter
from elastic.checkpoints.files.checksummed_file import Alive
from elastic.checkpoints.files.manifest import Manifest
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions, parse_every
from elastic.driver.job.checkpoint_shares import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointShares,
    ReplicaCorrupted,
    ReplicasCorrupted,
    SendToRanks,
)
from elastic.driver.membership.scheduling import rank_order
from elastic.protocol.messages import Commit, Message, Worker
from elastic.state.torch_state import TorchState
from harness import wording
from harness.golden import recorded
from harness.groups import at_once
from harness.sharded_writing import share_of
from harness.waiting import wait_until

GENERATION = 2
ROOM = 1000  # bytes that a full disk still takes at a time: what stands before a tensor, and not the tensor


class Job:
    """Ranks that commit together. What is sent goes through the driver's part in it, and to the others."""

    def __init__(
        self, folder: Any, ranks: int, every: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(background_writer, "monotonic", lambda: self.now)
        commits, seconds = parse_every(every)
        options = CheckpointOptions(str(folder), commits, seconds, run=1)
        self.storage = Storage(str(folder))
        self.workers = [Worker("h", slot, 1) for slot in range(ranks)]
        self.places = list(rank_order.places(self.workers))
        self.shares = CheckpointShares()
        self.shares.world(GENERATION, self.workers)
        self.made: list[Commit] = []
        self.failed: list[str] = []
        self.damaged: list[int] = []  # ranks
        self.spoilt: list[ReplicasCorrupted] = []
        self.step = 0
        self.over = False
        self._driver = threading.Lock()
        self.states = [self._state() for _ in range(ranks)]
        self.writers = [
            CheckpointWriter(Storage(str(folder)), options, self._sender(worker), alone=False)
            for worker in self.workers
        ]

    def _state(self) -> TorchState:
        torch.manual_seed(1)
        state = TorchState(model=torch.nn.Linear(30, 30), step=0)
        state.commit()
        return state

    def _sender(self, worker: Worker) -> Any:
        def send(message: Message) -> None:
            with self._driver:
                actions = self.shares.handle(worker, message)
            for action in actions or ():
                match action:
                    case SendToRanks(workers, message):
                        for each in workers:
                            self.writers[self.workers.index(each)].receive(message)
                    case CheckpointCompleted(commit):
                        self.made.append(commit)
                    case CheckpointFailed(_, _, reason):
                        self.failed.append(reason)
                    case ReplicaCorrupted(culprit):
                        self.damaged.append(self.workers.index(culprit))
                    case ReplicasCorrupted():
                        self.spoilt.append(action)

        return send

    def commit(self, times: int = 1) -> Commit:
        for _ in range(times):
            self.step += 1
            self.now += 0.5
            for state, rank, at in zip(self.states, self.writers, self.places, strict=True):
                with torch.no_grad():
                    state.model.weight.add_(1)
                state.step = self.step
                state.commit()
                rank.committed(state, Commit(GENERATION, self.step), at)
        return Commit(GENERATION, self.step)

    def finish(self) -> None:
        last = Commit(GENERATION, self.step)
        at_once(
            lambda writer, state, at: writer.finish(state, last, at, lambda: self.over),
            *(self.writers, self.states, self.places),
        )

    def has(self, number: int) -> None:
        """Waits until this commit is durable, and each rank knows that."""
        commit = Commit(GENERATION, number)
        wait_until(lambda: all(w.newest == commit for w in self.writers), f"commit {commit}")

    def loaded(self) -> TorchState:
        """What the newest checkpoint holds."""
        state = self._state()
        state_restoring.load(self.storage, self.newest(), state)
        return state

    def newest(self) -> Manifest:
        return catalog.read(self.storage, catalog.names(self.storage)[-1])


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Any]:
    jobs: list[Job] = []

    def make(ranks: int = 3, every: str = "5commits") -> Job:
        jobs.append(Job(tmp_path / "all", ranks, every, monkeypatch))
        return jobs[-1]

    yield make
    for each in jobs:
        for each_writer in each.writers:
            each_writer.close()


@pytest.fixture
def broken(monkeypatch) -> Any:
    """A storage in which nothing can be written while it is set."""
    away = threading.Event()
    writing = Storage.writing

    @contextlib.contextmanager
    def failing(self: Storage, name: str, *alive: Alive) -> Iterator[Any]:
        with writing(self, name, *alive) as file:
            write = file.write

            def full(content: Any, crc: int = 0) -> int:
                if len(content) > ROOM:
                    raise OSError(28, "No space left on device")
                return write(content, crc)

            if away.is_set():
                monkeypatch.setattr(file, "write", full)
            yield file

    monkeypatch.setattr(Storage, "writing", failing)
    return away


def test_each_fifth_commit_becomes_durable_on_all_ranks(job):
    ranks = job()
    for number in (5, 10):
        ranks.commit(5)
        ranks.has(number)
    assert ranks.made == [Commit(2, 5), Commit(2, 10)] and not ranks.failed
    assert torch.equal(ranks.loaded().model.weight, ranks.states[1].model.weight)


def test_the_last_commit_becomes_durable_when_the_function_returns(job):
    ranks = job()
    ranks.commit(4)
    ranks.finish()
    ranks.has(4)
    assert ranks.loaded().step == 4
    made = len(ranks.made)
    ranks.finish()
    assert len(ranks.made) == made, "it is durable already"


def test_checkpoint_in_progress_at_the_end_is_not_written_twice(job):
    ranks = job()
    ranks.commit(5)
    ranks.finish()
    ranks.has(5)
    assert ranks.made == [Commit(2, 5)]


def test_checkpoint_requested_by_the_script_is_the_next_commit(job):
    ranks = job(every="manual")
    ranks.commit(5)
    for rank in ranks.writers:
        rank.want()
    ranks.commit()
    ranks.has(6)
    ranks.commit(5)
    assert ranks.made == [Commit(2, 6)] and ranks.loaded().step == 6


def test_checkpoint_requested_during_a_write_is_made_later(job, broken):
    ranks = job(every="manual")
    ranks.commit(2)
    broken.set()
    for _ in range(2):
        for rank in ranks.writers:
            rank.want()
        ranks.commit()
    broken.clear()
    wait_until(lambda: ranks.commit() and len(ranks.made) == 2, "both")
    assert ranks.made[0] == Commit(2, 3) and ranks.made[1] > Commit(2, 4)


def test_request_of_one_rank_only_does_not_block_later_requests(job):
    ranks = job(every="manual")
    ranks.commit(2)
    ranks.writers[1].want()
    ranks.commit(20)
    for rank in ranks.writers:
        rank.want()
    wait_until(lambda: ranks.commit() and ranks.made, "what all have asked for")


def test_a_world_that_breaks_ends_the_wait(job, broken):
    ranks = job()
    broken.set()
    ranks.commit(5)
    ending = threading.Thread(target=ranks.finish)
    ending.start()
    ranks.over = True
    ending.join(10)
    assert not ending.is_alive() and not ranks.made


def test_full_storage_fails_no_commit_and_is_retried(job, broken, capsys):
    ranks = job()
    broken.set()
    ranks.commit(8)
    wait_until(lambda: wording.CANT_BE_WRITTEN in capsys.readouterr().err, "a word about it")
    broken.clear()
    ranks.has(5)
    assert os.strerror(errno.ENOSPC) not in "".join(ranks.failed)
    said = capsys.readouterr().err
    assert wording.CAN_BE_WRITTEN_AGAIN in said and said.count(wording.CANT_BE_WRITTEN) < 3
    assert ranks.loaded().step == 5


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 6))]
)
def test_last_commit_is_durable_and_complete_despite_storage_failures(job, monkeypatch, seed):
    drawn = random.Random(seed)
    writing = Storage.writing

    @contextlib.contextmanager
    def failing(self: Storage, name: str, *alive: Alive) -> Iterator[Any]:
        with writing(self, name, *alive) as file:
            if drawn.random() < 0.3:
                file.write(b"torn")
                raise OSError(5, "Input/output error")
            yield file
            if drawn.random() < 0.1:
                raise OSError(5, "Input/output error")

    monkeypatch.setattr(Storage, "writing", failing)
    monkeypatch.setattr(storage_retries, "LONGEST_RETRY_S", 0.1)
    ranks = job(drawn.randint(1, 4), f"{drawn.randint(1, 5)}commits")
    ranks.commit(drawn.randint(5, 12))
    ranks.finish()
    ranks.has(ranks.step)
    assert catalog.verify(ranks.storage, ranks.newest()) == ""
    assert torch.equal(ranks.loaded().model.weight, ranks.states[0].model.weight)


def test_infinite_parameters_replace_no_checkpoint(job):
    ranks = job()
    ranks.commit(5)
    ranks.has(5)
    before = ranks.states[0].model.weight.detach().clone()
    for state in ranks.states:
        state.model.weight.data[3, 4] = float("nan")
    ranks.commit(5)
    wait_until(lambda: ranks.failed, "a word about it")
    recorded("messages", ranks.failed)
    for state in ranks.states:
        state.model.weight.data.copy_(before)
    wait_until(lambda: all(each._settled for each in ranks.writers), "the end of that one")
    ranks.commit(5)
    ranks.has(15)


def test_single_replica_with_an_infinite_parameter_is_named(job):
    ranks = job()
    ranks.commit(5)
    ranks.has(5)
    ranks.states[0].model.weight.data[3, 4] = float("inf")
    ranks.commit(5)
    wait_until(lambda: ranks.damaged, "a word about it")
    assert ranks.damaged == [0] and ranks.made == [Commit(2, 5)]


def test_differing_replica_before_nan_gradients_is_reported_at_the_next_commit(job):
    ranks = job()
    ranks.commit(5)
    ranks.has(5)
    for rank, each in enumerate(ranks.writers):
        parameters = [("weight", torch.full((3,), float(rank == 1)))]
        each.first_not_finite.look("0", [torch.tensor(torch.nan)], parameters)
    ranks.commit()
    spoilt = ReplicasCorrupted(2, Commit(2, 6), [ranks.workers[1]], 2)
    assert ranks.spoilt == [spoilt]
    ranks.commit(3)
    assert ranks.spoilt == [spoilt], "it was said"
    ranks.commit(int(2 * background_writer.REPEAT_S))
    assert ranks.spoilt == [spoilt, spoilt], "the driver may be another one"


def test_parameters_infinite_from_the_start_are_accepted(job):
    ranks = job()
    for state in ranks.states:
        state.model.bias.data[0] = float("-inf")
    ranks.commit(5)
    ranks.has(5)
    ranks.commit(5)
    ranks.has(10)


@pytest.fixture
def sharded(job, monkeypatch) -> Job:
    """Ranks that hold the rows of one shard each."""
    ranks: Job = job()
    states = ranks.states
    hold = lambda state: share_of(state, states.index(state), len(states))  # noqa: E731
    monkeypatch.setattr(background_writer, "hold", hold)
    return ranks


def test_each_rank_checks_its_rows_of_sharded_parameters(sharded):
    sharded.commit(5)
    sharded.has(5)
    before = sharded.states[0].model.weight.detach().clone()
    for state in sharded.states:
        state.model.weight.data[29, 4] = float("nan")  # the last rank's
    sharded.commit(5)
    wait_until(lambda: sharded.failed, "a word about it")
    for state in sharded.states:
        state.model.weight.data.copy_(before)
    wait_until(lambda: all(each._settled for each in sharded.writers), "the end of that one")
    sharded.commit(5)
    sharded.has(15)
    assert sharded.made == [Commit(2, 5), Commit(2, 15)]
    assert sharded.newest().sharded


def test_sharded_parameters_infinite_from_the_start_are_accepted(sharded):
    for state in sharded.states:
        state.model.bias.data[29] = float("-inf")
    for number in (5, 10):
        sharded.commit(5)
        sharded.has(number)


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 20))]
)
def test_bit_flip_in_one_replica_is_found_before_the_next_checkpoint(job, seed):
    drawn = random.Random(seed)
    ranks = job()
    ranks.commit(5)
    ranks.has(5)
    victim = drawn.randrange(3)
    tensor = drawn.choice([*ranks.states[victim].model.parameters()]).detach()
    words = tensor.view(torch.int32).view(-1)
    # A mantissa's: adding 1 keeps it.
    words[drawn.randrange(len(words))] ^= 1 << drawn.randrange(20)
    ranks.commit(5)
    wait_until(lambda: ranks.damaged, "a word about it")
    assert ranks.damaged == [victim] and ranks.made == [Commit(2, 5)]
