"""Schedule of DiLoCo rounds and division of the parameters into fragments."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic.diloco.schedule import RoundSchedule, Sent, partition
from elastic.errors import Invalid


def test_fragments_are_spread_over_the_round():
    schedule = RoundSchedule(every=8, fragments=2, delay=3)
    sent = {n: schedule.sent_at(n) for n in range(1, 17)}
    assert {n: s for n, s in sent.items() if s} == {
        4: Sent(0, 4, 7),
        8: Sent(1, 8, 11),
        12: Sent(0, 12, 15),
        16: Sent(1, 16, 19),
    }


@given(every=st.integers(1, 40), fragments=st.integers(1, 8), delay=st.integers(0, 10))
def test_each_fragment_is_sent_once_a_round_and_merged_before_the_next_is_sent(
    every, fragments, delay
):
    assume(fragments <= every and delay < every // fragments)
    schedule = RoundSchedule(every, fragments, delay)
    sent = [s for n in range(1, 3 * every + 1) if (s := schedule.sent_at(n))]
    for start in range(3):
        a_round = [s.fragment for s in sent if start * every < s.step <= (start + 1) * every]
        assert sorted(a_round) == list(range(fragments))
    assert all(one.due < other.step for one, other in itertools.pairwise(sent))
    for n in range(3 * every + 1):
        counted = [sum(s.fragment == f and s.due <= n for s in sent) for f in range(fragments)]
        firsts = [(f + 1) * every // fragments + delay for f in range(fragments)]
        assert counted == [max(0, (n - first) // every + 1) for first in firsts]


@pytest.mark.parametrize(
    ("position", "due"),
    [(4, 7), (5, 8), (7, 10), (8, 11), (9, 11)],  # fragment 0 is sent after steps 4 and 12
)
def test_merge_is_due_a_delay_after_a_late_send_but_before_the_next_round(position, due):
    schedule = RoundSchedule(every=8, fragments=2, delay=3)
    assert schedule.sent_late(Sent(0, 4, 7), position) == Sent(0, 4, due)


def test_merge_of_a_late_send_without_a_delay_is_due_immediately():
    assert RoundSchedule(every=4).sent_late(Sent(0, 4, 4), 5) == Sent(0, 4, 5)


@pytest.mark.parametrize(
    "arguments", [(0,), (True,), (1.5,), (8, 0), (8, 9), (8, 2, 4), (8, 1, 8), (8, 1, -1)]
)
def test_schedule_refuses_arguments_out_of_range(arguments):
    with pytest.raises(Invalid):
        RoundSchedule(*arguments)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.data())
def test_partition_covers_all_parameters_in_order_and_leaves_no_fragment_empty(sizes, data):
    fragments = data.draw(st.integers(1, len(sizes)))
    parts = partition(sizes, fragments)
    assert len(parts) == fragments and all(parts)
    assert [index for part in parts for index in part] == list(range(len(sizes)))


def test_partition_balances_elements():
    assert partition([10] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert partition([100, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]


def test_partition_refuses_more_fragments_than_parameters():
    with pytest.raises(Invalid):
        partition([3, 4], 3)


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (8, 2, 3), (10, 3, 1)])
def test_merge_by_its_number_is_the_fragment_that_is_sent_at_its_step(every, fragments, delay):
    schedule = RoundSchedule(every, fragments, delay)
    sent = [each for step in range(1, 40) if (each := schedule.sent_at(step)) is not None]
    assert [schedule.merge(number) for number in range(len(sent))] == sent
