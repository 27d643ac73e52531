"""Older commits of a state with verified shards: they are restored with all bits, after any number of later commits."""

from __future__ import annotations

import random

import pytest
import torch

from elastic.exact.shards import Shards
from elastic.protocol.messages import Commit
from elastic.state.handlers.part import StateHandler
from elastic.state.torch_state import TorchState


class Training:
    """Steps of a small model with every kind of value in its state."""

    def __init__(self, **options) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.shards = Shards(4, seed=2, **{"verify": 1 / 4, "verify_window": 3, **options})
        self.shards._served.add(self.optimizer)
        self.state = TorchState(
            rng=True, model=self.model, optimizer=self.optimizer, shards=self.shards, losses=[]
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.state.losses.append([loss.item(), random.random()])
        self.shards.step += 1

    def commit(self, generation: int = 2) -> None:
        self.state.save()
        self.state.keep_older(Commit(generation, self.shards.step))

    def digests(self) -> tuple:
        self.state.save()
        return self.state.digest_tensors(), self.state.losses[:], self.shards.step


def train(training: Training, steps: int, generation: int = 2) -> dict[int, tuple]:
    """Return what each commit held, by step."""
    found = {}
    for _ in range(steps):
        training.step()
        training.commit(generation)
        found[training.shards.step] = training.digests()
    return found


def test_state_restored_to_an_older_commit_has_the_same_bits_in_all_later_steps():
    torch.manual_seed(4)
    random.seed(4)
    training = Training()
    training.commit()
    found = train(training, 10)
    (older, newer) = training.state.kept_commits()
    assert (older.step, newer.step) == (6, 9)
    training.state.go_back(older.commit, restores=True)
    assert training.digests() == found[6]
    assert [each.step for each in training.state.kept_commits()] == [6]
    assert train(training, 4, generation=3) == {step: found[step] for step in (7, 8, 9, 10)}
    # A later failure restores the commit that was made since, not the copy.
    training.step()
    training.state.restore()
    assert training.digests() == found[10]


def test_state_when_another_rank_restores_then_only_newer_copies_are_dropped():
    training = Training()
    training.commit()
    found = train(training, 7)
    training.state.go_back(Commit(2, 3), restores=False)
    assert [each.step for each in training.state.kept_commits()] == [3]
    assert training.digests() == found[7]


@pytest.mark.parametrize(
    "options", [{"verify": 0.0}, {"verify_window": 0}, {"verify": 1.0, "verify_window": None}]
)
def test_state_without_verification_keeps_no_older_commits(options):
    training = Training(**options)
    train(training, 5)
    assert not training.state.kept_commits()


def test_state_when_the_script_has_a_handler_of_its_own_then_no_copies_are_kept():
    class Own(StateHandler):
        def save(self) -> None: ...

        def restore(self) -> None: ...

    training = Training()
    training.state._handlers["own"] = Own([])
    train(training, 5)
    assert not training.state.kept_commits()
