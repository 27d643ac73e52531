"""The interval between copies of a state under ``--commit-budget``."""

from __future__ import annotations

import pytest

from elastic.state.commit_budget import LONGEST_S, CommitBudget, interval


def calls(budget: CommitBudget, copy_s: float, step_s: float, number: int) -> list[int]:
    """Return the calls at which a copy was made."""
    made = []
    for call in range(number):
        if budget.due():
            made.append(call)
            budget.copied([copy_s], [step_s])
    return made


@pytest.mark.parametrize(
    ("copy_s", "step_s", "steps"),
    [
        (0.001, 0.1, 1),  # within the budget at each step
        (0.01, 0.1, 5),
        (0.0101, 0.1, 6),  # rounded up: never above the budget
        (100.0, 0.1, 600),  # a failure repeats a minute at most
        (100.0, 90.0, 1),  # a step longer than that
    ],
)
def test_interval_is_the_shortest_within_the_budget_and_the_longest_loss(copy_s, step_s, steps):
    assert interval(0.02, copy_s, step_s) == steps
    assert steps == 1 or (steps - 1) * step_s <= LONGEST_S


def test_first_copies_are_made_at_once_and_not_measured():
    budget = CommitBudget(0.02)
    made = calls(budget, 50.0, 0.1, 2)
    assert made == [0, 1] and budget.every == 1


def test_copies_follow_the_measured_costs_of_the_slowest_rank():
    budget = CommitBudget(0.02)
    calls(budget, 0.01, 0.1, 3)
    assert budget.every == 5
    assert calls(budget, 0.01, 0.1, 20) == [4, 9, 14, 19]
    budget.due()
    assert budget.copied([0.001, 0.1, 0.001], [0.2, 0.1, 0.3])
    assert budget.every == 50


def test_copies_use_no_more_than_the_budget_of_a_long_training():
    for copy_s, step_s in ((0.003, 0.1), (0.02, 0.15), (0.4, 0.05), (1.0, 1.0)):
        budget = CommitBudget(0.02)
        made = calls(budget, copy_s, step_s, 5000)
        assert (len(made) - 3) * copy_s <= 0.02 * 5000 * step_s * 1.26


def test_small_changes_of_the_costs_keep_the_interval():
    budget = CommitBudget(0.02)
    calls(budget, 0.02, 0.1, 3)
    assert budget.every == 10
    for copy_s in (0.018, 0.022, 0.024):
        assert not budget.copied([copy_s], [0.1])
    assert budget.copied([0.05], [0.1]) and budget.every == 25


def test_unknown_duration_of_a_step_keeps_the_interval():
    budget = CommitBudget(0.02)
    for _ in range(5):
        assert not budget.copied([1.0, 1.0], [0.0, 0.1])
