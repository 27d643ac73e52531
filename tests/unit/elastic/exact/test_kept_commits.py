"""Older commits that a worker keeps: at most two, of which one is old enough."""

from __future__ import annotations

import random

import pytest

from elastic.exact.kept_commits import KeptCommits
from elastic.protocol.messages import Commit


def keep(kept: KeptCommits[int], step: int, window: int, generation: int = 2) -> None:
    if kept.due(step, window):
        kept.add(Commit(generation, step), step, step)


@pytest.mark.parametrize(("window", "every"), [(1, 1), (8, 1), (8, 3), (5, 20)])
def test_copies_when_commits_are_made_then_one_is_a_window_old_and_two_are_kept(window, every):
    kept: KeptCommits[int] = KeptCommits()
    for step in range(0, 200, every):
        keep(kept, step, window)
        assert 1 <= len(kept.held) <= 2
        assert kept.held[0].step <= max(0, step - window)
        assert step - kept.held[0].step < 2 * window + 2 * every
        for each in kept.held:
            assert kept.copy_of(each.commit) == each.step


def test_copies_when_the_window_is_zero_then_are_dropped():
    kept: KeptCommits[int] = KeptCommits()
    keep(kept, 3, 8)
    keep(kept, 4, 0)
    assert not kept.held


def test_copies_when_a_world_begins_with_an_older_commit_then_newer_ones_are_dropped():
    kept: KeptCommits[int] = KeptCommits()
    for step in range(9):
        keep(kept, step, 4)
    assert [each.step for each in kept.held] == [4, 8]
    kept.forget_after(Commit(2, 4))
    assert [each.step for each in kept.held] == [4] and kept.copy_of(Commit(2, 8)) is None
    keep(kept, 8, 4, generation=3)
    assert [each.commit for each in kept.held] == [Commit(2, 4), Commit(3, 8)]


def test_copies_when_the_window_changes_then_the_older_one_remains_old_enough():
    dice, kept = random.Random(3), KeptCommits[int]()
    for step in range(500):
        window = dice.choice((4, 7))
        keep(kept, step, window)
        assert len(kept.held) <= 2 and kept.held[0].step <= max(0, step - 4)
