"""Each sample of an epoch is in exactly one part of exactly one step, for any assignment and start."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.seeds import sample_seed, seed_of
from elastic.errors import Invalid
from harness.golden import raises

dealings = st.builds(SamplePartition, parts=st.integers(1, 9), batch=st.integers(1, 40))


def test_step_is_divided_into_consecutive_parts_of_nearly_equal_size():
    dealing = SamplePartition(parts=3, batch=6)
    steps = list(dealing.rest(0, 20))
    assert [[list(dealing.part(step, part)) for part in range(3)] for step in steps] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
        [[12, 13], [14], [15]],
        [[16, 17], [18], [19]],
    ]
    assert [dealing.weight(steps[2], part) for part in range(3)] == [1.5, 0.75, 0.75]
    assert dealing.weight(steps[0], 1) == 1.0


def test_part_is_empty_only_when_a_step_has_fewer_samples_than_parts():
    dealing = SamplePartition(parts=4, batch=4)
    last = list(dealing.rest(0, 6))[-1]
    assert [list(dealing.part(last, part)) for part in range(4)] == [[4], [5], [], []]
    assert [dealing.weight(last, part) for part in range(4)] == [2.0, 2.0, 0.0, 0.0]


@given(dealings, st.integers(0, 200), st.integers(0, 200))
def test_remaining_samples_of_an_epoch_are_each_assigned_once(dealing, consumed, length):
    steps = list(dealing.rest(consumed, length))
    dealt = [
        place
        for step in steps
        for part in range(dealing.parts)
        for place in dealing.part(step, part)
    ]
    assert dealt == list(range(consumed, length))
    assert len(steps) == dealing.steps(max(0, length - consumed))
    for step in steps:
        assert len(step) <= dealing.batch
        sizes = [len(dealing.part(step, part)) for part in range(dealing.parts)]
        assert max(sizes) - min(sizes) <= 1
        assert sum(dealing.weight(step, part) for part in range(dealing.parts)) == pytest.approx(
            dealing.parts
        )


@given(dealings, st.integers(1, 400))
def test_steps_have_a_sample_for_each_part_when_possible(dealing, length):
    if length < dealing.parts or dealing.batch < 2 * dealing.parts:
        return
    assert all(len(step) >= dealing.parts for step in dealing.rest(0, length))


@given(dealings, st.integers(0, 400), st.integers(0, 100))
def test_step_size_does_not_depend_on_samples_beyond_its_reach(dealing, left, more):
    if left >= dealing.reach:
        assert dealing.size(left) == dealing.size(left + more)


@given(st.integers(1, 300), st.lists(st.tuples(dealings, st.integers(0, 12)), max_size=12))
def test_consecutive_worlds_assign_each_sample_once(length, worlds):
    """Each world trains some steps from where the previous one stopped; the last one finishes."""
    counted, position = Counter[int](), Position()
    for dealing, steps in [*worlds, (SamplePartition(2, 5), length)]:
        for _ in range(steps):
            step = dealing.step(position.consumed, length)
            for part in range(dealing.parts):
                counted.update(dealing.part(step, part))
            position = Position(position.epoch, step.stop)
    assert counted == Counter(range(length))


@given(dealings, st.integers(0, 300))
def test_drop_last_ends_an_epoch_before_an_incomplete_step(dealing, length):
    dealing = SamplePartition(dealing.parts, dealing.batch, drop_last=True)
    steps = list(dealing.rest(0, length))
    assert [len(step) for step in steps] == [dealing.batch] * (length // dealing.batch)
    assert len(steps) == dealing.steps(length)


@pytest.mark.parametrize(("parts", "batch"), [(0, 4), (2, 0)])
def test_bad_input_is_refused(parts, batch):
    with raises(Invalid):
        SamplePartition(parts, batch)


def test_sample_seeds_have_fixed_distinct_values():
    assert sample_seed(0, 1, 2) == seed_of("sample", 0, 1, 2) == 5843981655370092221
    drawn = {seed_of(word, a, b) for word in ("order", "step") for a in range(9) for b in range(99)}
    assert len(drawn) == 2 * 9 * 99
    assert all(0 <= seed < 1 << 64 for seed in drawn)
    assert seed_of("a", 1, 23) != seed_of("a", 12, 3)
