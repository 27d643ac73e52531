"""Actions with many members: written as ranges of slots, and read as they were."""

from __future__ import annotations

import json
import random
from zlib import crc32

import pytest
from msgspec import ValidationError, to_builtins
from msgspec.json import encode as json_encode
from msgspec.structs import replace as replaced

from elastic.driver import events
from elastic.driver.journal.entries import (
    RANGES_FROM,
    Entry,
    RangedAction,
    RecordedEntry,
    _kinds,
    decoded,
    decoded_for_replay,
    digest_of,
    encoded,
    entry_of,
    same,
)
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


def changed(workers: list[Worker], number: int) -> list[Worker]:
    """Return other members: the n-th of a few ways to differ."""
    middle = len(workers) // 2
    before, worker, after = workers[:middle], workers[middle], workers[middle + 1 :]
    return [
        [*before, worker.next(), *after],
        [*before, Worker("h99", worker.slot), *after],
        [*before, Worker(worker.host, 99), *after],
        [*before, *after],
        [*before, after[0], worker, *after[1:]],
        [*workers, Worker("h99", 0)],
    ][number]


@pytest.mark.parametrize("make", [published, lambda workers: events.BreakWorld(3, workers, WHY)])
@pytest.mark.parametrize("workers", orders()[:4], ids=range(4))
def test_replayed_action_with_ranges_is_compared_with_all_members(workers, make):
    entry = decoded_for_replay(encoded(Entry(1.5, events.TimePassed(), [make(workers)])))
    assert isinstance(entry, RecordedEntry)
    [recorded] = entry.actions
    assert isinstance(recorded, RangedAction)
    assert recorded.matches(make(workers)) and same(recorded, make(workers))
    assert recorded.expanded() == make(workers)
    for number in range(6):
        assert not same(recorded, make(changed(workers, number)))
    assert not same(recorded, replaced(make(workers), generation=4))
    assert not same(recorded, None)
    assert not same(recorded, events.EndJob(1, WHY))
    reworded = replaced(make(workers), reason=as_sentence("other words"))
    assert same(recorded, reworded) and not recorded.matches(reworded)


@pytest.mark.parametrize("workers", orders(), ids=range(len(orders())))
def test_digest_of_an_action_does_not_depend_on_how_its_members_are_encoded(workers):
    """Drivers of earlier versions computed the digest from plain values."""
    for action in [
        published(workers),
        events.ProbeWorkers(workers),
        events.FinishWorld(3, workers),
    ]:
        fields = to_builtins(action)
        if "reason" in fields:
            assert isinstance(action, events.PublishWorld)
            fields["reason"] = _kinds(action.reason)
        assert digest_of([action]) == crc32(json_encode([fields]))


@pytest.mark.parametrize("line", [b"{}", b'{"at":1.0}', b'{"event":{"type":"TimePassed"}}'])
def test_line_of_no_known_kind_is_invalid(line):
    with pytest.raises(ValidationError):
        decoded(line)
