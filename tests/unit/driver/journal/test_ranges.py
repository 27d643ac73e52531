"""Actions with many members: written as ranges of slots, and read as they were."""

from __future__ import annotations

import json
import random

import pytest

from elastic.driver import events
from elastic.driver.journal.entries import RANGES_FROM, Entry, decoded, encoded, entry_of
from elastic.driver.membership.scheduling import rank_order
from elastic.driver.reasons import as_sentence
from elastic.protocol.messages import Address, Worker

WHY = as_sentence('said "ranges": [["h", 0, 1, 9]]')


def published(workers: list[Worker]) -> events.PublishWorld:
    members = [*map(events.Member, workers, rank_order.places(workers))]
    return events.PublishWorld(3, members, Address("h", 1), 1, None, WHY)


def orders() -> list[list[Worker]]:
    hosts = [Worker(f"h{host}", slot) for host in range(20) for slot in range(8)]
    restarted = [w.next() if w.slot == 3 and w.host < "h15" else w for w in hosts]
    shuffled = random.Random(1).sample(restarted, len(restarted))
    return [hosts, restarted, shuffled, hosts[:RANGES_FROM], hosts[: RANGES_FROM - 1], []]


@pytest.mark.parametrize("workers", orders(), ids=range(len(orders())))
def test_action_with_many_members_is_read_as_it_was_recorded(workers):
    actions = [
        published(workers),
        events.BreakWorld(3, workers, WHY),
        events.StopMembersAt(3, 1, 7, workers),
        events.FinishWorld(3, workers),
        events.EndJob(1, WHY),
    ]
    entry = Entry(1.5, events.HostLost("h1", "silent"), actions)
    line = encoded(entry)
    assert decoded(line) == entry
    assert entry_of(json.loads(line)).actions == actions


def test_ranges_describe_consecutive_slots_of_one_incarnation():
    workers = orders()[0]
    workers[3] = workers[3].next()
    line = json.loads(encoded(Entry(1.5, events.TimePassed(), [published(workers)])))
    [action] = line["actions"]
    assert action["members"] == []
    assert action["ranges"][:4] == [
        ["h0", 0, 1, 3],
        ["h0", 3, 2, 1],
        ["h0", 4, 1, 4],
        ["h1", 0, 1, 8],
    ]
    assert len(action["ranges"]) == 22


def test_small_world_is_written_with_its_members():
    world = published([Worker("h", slot) for slot in range(4)])
    line = json.loads(encoded(Entry(1.5, events.TimePassed(), [world])))
    assert [each["worker"][1] for each in line["actions"][0]["members"]] == [0, 1, 2, 3]
    assert "ranges" not in line["actions"][0]
