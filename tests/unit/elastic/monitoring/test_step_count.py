"""Optimizer steps of a training are counted without a line in the script."""

from __future__ import annotations

import pytest
import torch

import elastic
from elastic.monitoring import step_count


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    for name in ("steps", "batch", "state_step", "_taken"):
        monkeypatch.setattr(step_count, name, None)
    monkeypatch.setattr(step_count, "_counted", 0)


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.1)


def count() -> int | None:
    return step_count.steps


def test_steps_are_counted_while_a_function_trains():
    first = optimizer()
    first.step()
    assert count() is None
    with step_count.counting():
        first.step()
        first.step()
    first.step()
    assert count() == 2


def test_restored_commit_resets_the_step_to_that_of_the_state():
    state = elastic.ObjectState(step=3)
    step_count.committed(5)
    state.report_step()
    assert step_count.state_step == 3
    elastic.ObjectState(epoch=1).report_step()
    assert step_count.state_step is None


def test_step_of_two_optimizers_counts_once():
    first, second = optimizer(), optimizer()
    with step_count.counting():
        for _ in range(3):
            first.step()
            second.step()
    assert count() == 3


def test_only_an_integer_is_recorded_as_the_step_of_the_state():
    for step, known in ((7, 7), (True, None), (None, None), ("7", None)):
        step_count.committed(step)
        assert step_count.state_step == known


def test_batch_size_is_known_only_when_all_loaders_have_the_same():
    cases: list[tuple[set[int | None], int | None]]
    cases = [({32}, 32), ({32, 64}, None), (set(), None), ({None}, None)]
    for sizes, known in cases:
        step_count.of_batches(sizes)
        assert step_count.batch == known


def test_step_count_of_an_optimizer_is_read_from_commits():
    found = []
    for taken in (40, 43, 43, 41, 44):  # a commit of step 41 was restored
        step_count.committed(None, taken)
        found.append((step_count.state_step, count()))
    assert found == [(40, 0), (43, 3), (43, 3), (41, 3), (44, 6)]
    step_count.committed(7, 45)
    assert (step_count.state_step, count()) == (7, 7)


def test_steps_of_a_torch_optimizer_are_not_counted_twice():
    with step_count.counting():
        optimizer().step()
    step_count.committed(None, 1)
    step_count.committed(None, 5)
    assert count() == 1
