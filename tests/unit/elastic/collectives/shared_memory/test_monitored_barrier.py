"""monitored_barrier: messages, waits and errors of each rank."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest

from elastic.collectives.shared_memory.point_to_point import (
    MessageGroup,
    SharedMessage,
    monitored_barrier,
)
from elastic.errors import CollectiveFailed

TIMEOUT_S = 0.1


def group_of(rank: int, size: int, arrived: dict[int, bool]):
    """``arrived``: by rank, whether its message arrives in time."""
    group = create_autospec(MessageGroup, instance=True)
    group.rank, group.size, group.timeout_s = rank, size, 30.0
    group.messages = {}

    def receive(tensor, source, tag):
        message = create_autospec(SharedMessage, instance=True)
        message.within.return_value = arrived[source]
        group.messages[source] = message
        return message

    group.receive.side_effect = receive
    group.fail.side_effect = CollectiveFailed
    return group


@pytest.mark.parametrize(("every_rank", "late"), [(False, "Rank 1"), (True, "Ranks 1, 3")])
def test_rank_0_names_the_ranks_that_did_not_arrive(every_rank, late):
    group = group_of(0, 4, {1: False, 2: True, 3: False})
    with pytest.raises(CollectiveFailed):
        monitored_barrier(group, TIMEOUT_S, every_rank)
    (why,) = group.fail.call_args.args
    assert f"{late} failed to pass monitoredBarrier" in why  # torch's own words


def test_rank_0_releases_the_remaining_ranks_once_all_have_arrived():
    group = group_of(0, 3, {1: True, 2: True})
    monitored_barrier(group, TIMEOUT_S, False)
    assert [call.args[1] for call in group.send.call_args_list] == [1, 2]


def test_other_rank_waits_longer_than_the_timeout_of_rank_0():
    group = group_of(1, 3, {0: False})
    with pytest.raises(CollectiveFailed):
        monitored_barrier(group, TIMEOUT_S, False)
    (waited_s,) = group.messages[0].within.call_args.args
    assert waited_s > 5 * TIMEOUT_S
