"""Metadata that workers send with Ready: which worlds contain it, and that all members receive the same."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver.events import Event, PublishWorld, TellWorld, WorkerReconnected
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.protocol.messages import MEMBERS_WITH_METADATA
from harness.conversation import (
    MembershipConversation,
    exited,
    hosts,
    on_two_hosts,
    ready,
    running,
    started,
    the,
    worker,
)
from unit.driver.membership.worlds.test_spoilt_commits import outvoted

LEFT = ("h:0", "h:1", "h:2")


def ready_with(name: str, generation: int, commit: tuple[int, int] | None, text: str) -> Event:
    event = ready(name, generation, commit)
    metadata = {"islands": text} if text else {}
    return msgspec.structs.replace(event, metadata=metadata, source={"state": f"of {name}"})


def after_a_loss(talk: MembershipConversation, **texts: str) -> PublishWorld:
    """Return the world of the remaining three workers, of which h:0 holds an older commit."""
    talk.tell(exited("h:3", -9))
    commits = {"h:0": (2, 4), "h:1": (2, 5), "h:2": (2, 5)}
    events = [ready_with(name, 2, commits[name], texts.get(name[-1:], name)) for name in LEFT]
    return the(PublishWorld, talk.tell(*events))


def test_members_receive_each_others_metadata_in_rank_order():
    world = after_a_loss(running(4))
    assert [str(each.worker) for each in world.members] == ["h:1#1", "h:2#1", "h:0#1"]
    assert world.metadata == [{"islands": name} for name in ("h:1", "h:2", "h:0")]
    assert world.source == {"state": "of h:1"}


def test_member_without_metadata_has_an_empty_entry():
    world = after_a_loss(running(4), **{"2": ""})
    assert world.metadata == [{"islands": "h:1"}, {}, {"islands": "h:0"}]


def test_first_world_has_no_metadata_because_no_commit_exists():
    talk = started(2)
    world = the(PublishWorld, talk.tell(*(ready_with(f"h:{n}", 1, None, "x") for n in range(2))))
    assert world.holders == 0
    assert world.metadata == []
    assert world.source == {}


def test_world_that_begins_with_an_older_commit_has_no_metadata():
    talk = on_two_hosts()
    outvoted(talk)
    events = [ready(name, 2, (2, 70), kept=[(2, 0)]) for name in ("a:0", "a:1", "b:1")]
    sent = {"metadata": {"islands": "x"}, "source": {"state": "newest"}}
    given = [msgspec.structs.replace(event, **sent) for event in events]
    world = the(PublishWorld, talk.tell(*given))
    assert world.commit is not None and world.commit.number == 0
    assert world.metadata == []
    assert world.source == {}


@pytest.mark.parametrize("size", [MEMBERS_WITH_METADATA, MEMBERS_WITH_METADATA + 1])
def test_large_world_has_no_metadata(size):
    talk = running(size + 1)
    talk.tell(exited(f"h:{size}", -9))
    events = [ready_with(f"h:{slot}", 2, (2, 5), "x") for slot in range(size)]
    world = the(PublishWorld, talk.tell(*events))
    assert len(world.metadata) == (size if size == MEMBERS_WITH_METADATA else 0)


def test_metadata_is_that_of_the_last_report():
    talk = running(4)
    talk.tell(exited("h:3", -9), ready_with("h:0", 2, (2, 4), "first"))
    world = after_a_loss(talk)
    assert {"islands": "h:0"} in world.metadata


def test_repeated_world_has_the_metadata_of_the_first_message_also_after_another_driver_took_over():
    talk = running(4)
    world = after_a_loss(talk)
    again = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    for membership in (talk.m, again):
        actions = membership.handle(WorkerReconnected(worker("h:2"), 2, True), talk.now)
        repeated = the(TellWorld, actions)
        assert (repeated.metadata, repeated.source) == (world.metadata, world.source)


def test_source_of_a_member_is_not_kept_when_the_world_has_been_published():
    talk = running(4)
    after_a_loss(talk)
    assert {talk.m.roster[worker(name)].source for name in LEFT} == {None}


def test_newcomer_contributes_metadata():
    talk = running(2, workers_min=1, workers_max=3)
    talk.tell(hosts(h=2, k=1))
    talk.connect("k:0")
    talk.tell(exited("h:1", -9), ready_with("k:0", 0, None, "new"))
    world = the(PublishWorld, talk.tell(ready_with("h:0", 2, (2, 5), "old")))
    assert world.metadata == [{"islands": "old"}, {"islands": "new"}]
