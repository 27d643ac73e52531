"""Numbers of shards of ranks by their speeds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.exact import load_balancing
from elastic.exact.load_balancing import PATIENCE, PERIOD, WINDOW, LoadBalancer, SpeedWindow
from elastic.exact.shard_assignment import place


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(0, 6))
def test_chosen_division_is_among_the_fastest(seconds, more):
    shards = len(seconds) + more
    found = load_balancing.fastest(seconds, shards)
    assert sum(found) == shards
    assert min(found) >= 1
    others = itertools.product(range(1, more + 2), repeat=len(seconds))
    best = min(
        load_balancing.step_s(seconds, division) for division in others if sum(division) == shards
    )
    assert load_balancing.step_s(seconds, found) == best


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_each_shard_has_one_rank_for_any_division(sizes):
    held = place(sizes)
    assert [len(each) for each in held] == sizes
    assert sorted(itertools.chain(*held)) == list(range(sum(sizes)))
    assert all(list(each) == sorted(each) for each in held)


@pytest.mark.parametrize("odd", [0.0, -1.0, float("inf"), float("nan")])
def test_rank_without_a_measurement_has_the_mean_of_measured_ranks(odd):
    assert load_balancing.known([1.0, odd, 3.0]) == [1.0, 2.0, 3.0]
    assert load_balancing.known([odd, odd]) == []


def exchange(world: LoadBalancer, *seconds: float, may_change: bool = True) -> None:
    while not world.due():
        pass
    world.exchanged(seconds, may_change)


def test_a_division_changes_after_two_exchanges_and_at_a_commit():
    world = LoadBalancer(16, 4)
    assert world.division == (4, 4, 4, 4)
    for _ in range(PATIENCE):
        assert not world.committed()
        exchange(world, 1.0, 3.0, 1.0, 1.0)
    assert world.division == (4, 4, 4, 4)
    exchange(world, 9.0, 1.0, 1.0, 1.0)  # measured under the old division
    assert world.committed()
    assert world.division == (5, 1, 5, 5)
    assert not world.committed()


def test_single_slow_exchange_does_not_change_the_division():
    world = LoadBalancer(16, 4)
    for _ in range(5):
        exchange(world, 1.0, 3.0, 1.0, 1.0)
        exchange(world, 1.0, 1.0, 1.0, 1.0)
        assert not world.committed()


def test_division_changes_only_when_all_ranks_commit_before_fetching():
    world = LoadBalancer(16, 4)
    assert not world.committed() and not world.may_change  # before a step, a commit shows nothing
    for _ in range(PATIENCE + 2):
        exchange(world, 1.0, 3.0, 1.0, 1.0, may_change=False)
        assert not world.committed() and world.may_change
    exchange(world, 1.0, 3.0, 1.0, 1.0)
    assert world.committed(fetched=True) and not world.may_change
    assert not world.committed() and not world.may_change


def test_ranks_exchange_early_and_then_in_a_fixed_period():
    world = LoadBalancer(8, 2)
    assert [step for step in range(1, 14) if world.due()] == [2, *range(PERIOD, 14, PERIOD)]


@pytest.mark.parametrize(("shards", "ranks"), [(4, 1), (4, 4), (3, 4)])
def test_ranks_with_at_most_one_shard_never_exchange(shards, ranks):
    world = LoadBalancer(shards, ranks)
    assert not any(world.due() for _ in range(20))


def test_a_window_has_the_median_of_the_last_steps_without_the_first():
    window = SpeedWindow()
    assert window.median_s == 0.0
    window.took(900.0, 3)
    assert window.median_s == 0.0
    window.took(3.0, 3)
    window.took(0.0, 0)  # as a spare
    assert window.median_s == 1.0
    window.took(80.0, 1)
    window.took(2.0, 1)
    assert window.median_s == 2.0
    for _ in range(WINDOW):
        window.took(10.0, 2)
    assert window.median_s == 5.0
