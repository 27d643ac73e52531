"""Names of what the ranks of a world exchange through its store."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest

from elastic.collectives import threads_at_exit
from elastic.collectives.groups import group_factory
from elastic.collectives.store_group import Broadcast, DistantGroup
from elastic.protocol.messages import STATE, Address, Place, World
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import Store
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.driver_connection import Link
from elastic.runtime.guarded_groups import GuardedGroups, StoreExchange, as_text, reply_to
from elastic.runtime.process_groups import Groups
from elastic.runtime.recovery import Phase
from elastic.runtime.session import Session


@pytest.mark.parametrize("ranks", [(0, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_values_of_a_copy_have_other_keys_than_the_group_that_connects(ranks):
    session = Session(
        dataclasses.replace(worker_settings.read({}), elastic=True),
        create_autospec(Link, instance=True),
    )
    session.recovery.place = Place(0, 4, 0, 2, 0, 2)
    groups: Any = create_autospec(Groups, instance=True)
    store = groups.store = create_autospec(Store, instance=True)
    session.groups = groups
    store.exchange.return_value = [b""] * len(ranks)
    group = GuardedGroups(session, ProgressCounter()).copy_group(STATE, ranks)
    assert isinstance(group, DistantGroup)
    for _ in range(6):
        group.swap(b"")
    keys = [call.args[0] for call in store.exchange.call_args_list]
    assert len(set(keys)) == 6
    for name in (STATE, f"{STATE} of {','.join(map(str, ranks))}"):
        assert group_factory.meeting(name, "cpu", len(ranks)) not in keys


def test_exchange_in_the_background_does_not_delay_the_exit(monkeypatch):
    monkeypatch.setattr(threads_at_exit, "_begun", set())
    ends = threading.Event()
    store = create_autospec(Store, instance=True)
    store.exchange.side_effect = lambda *_: [b"x"] if ends.wait(10.0) else []
    exchange = StoreExchange(store, "islands", 0, 2, b"x", 10.0)
    assert threads_at_exit.finish(0.0)
    ends.set()
    assert exchange.wait() == [b"x"]


def in_world(metadata: list[dict[str, str]]) -> tuple[GuardedGroups, Any]:
    """Return the groups of rank 0 of 2, and the store of the world."""
    session = Session(
        dataclasses.replace(worker_settings.read({}), elastic=True),
        create_autospec(Link, instance=True),
    )
    place = Place(0, 2, 0, 1, 0, 2)
    session.recovery.place = place
    session.recovery.world = World(3, place, Address("h", 1), 2, None, "", metadata=metadata)
    groups: Any = create_autospec(Groups, instance=True)
    store = groups.store = create_autospec(Store, instance=True)
    store.exchange.return_value = [b"eu", b"us"]
    session.groups = groups
    return GuardedGroups(session, ProgressCounter()), store


def test_exchange_of_a_value_that_is_metadata_of_all_ranks_needs_no_store():
    groups, store = in_world([{"islands": "eu"}, {"islands": "us"}])
    received: list[list[bytes]] = []
    exchange = groups.start_exchange("islands", b"eu", received.append)
    assert received == [[b"eu", b"us"]]
    assert exchange.wait() == [b"eu", b"us"]
    assert not store.exchange.called


@pytest.mark.parametrize("metadata", [[], [{"islands": "eu"}, {"other": "us"}]])
def test_exchange_uses_the_store_if_a_rank_has_not_sent_the_value(metadata):
    groups, store = in_world(metadata)
    assert groups.start_exchange("islands", b"eu").wait() == [b"eu", b"us"]
    assert store.exchange.call_args.args[0] == "islands"


def test_second_exchange_of_a_name_uses_the_store_because_the_value_may_have_changed():
    groups, store = in_world([{"islands": "eu"}, {"islands": "us"}])
    groups.start_exchange("islands", b"eu").wait()
    groups.start_exchange("islands", b"asia").wait()
    assert [call.args[3] for call in store.exchange.call_args_list] == [b"asia"]


REPLY = {reply_to(STATE): as_text(b"none")}


def copied(metadata: list[dict[str, str]], source: dict[str, str]) -> tuple[DistantGroup, Any]:
    """Return the group in which rank 0 sends the state to rank 1 on another host, and the store."""
    groups, store = in_world(metadata)
    recovery = groups._session.recovery
    recovery.place = Place(0, 2, 0, 1, 0, 2)
    assert recovery.world is not None
    recovery.world = msgspec.structs.replace(recovery.world, source=source)
    store.exchange.return_value = [b"\0content", b"\0reply"]
    group = groups.copy_group(STATE, (0, 1), replies=True)
    assert isinstance(group, DistantGroup)
    return group, store


def test_first_broadcast_of_a_copy_that_is_in_the_message_about_the_world_needs_no_store():
    group, store = copied([{}, REPLY], {STATE: as_text(b"header")})
    assert group.start_broadcast(b"header", 0)() == Broadcast(b"header", [b"none"])
    assert not store.exchange.called
    assert group.start_broadcast(b"content", 0)() == Broadcast(b"content", [b"reply"])


@pytest.mark.parametrize(
    ("metadata", "source"),
    [([{}, {}], {STATE: as_text(b"header")}), ([{}, REPLY], {}), ([], {STATE: as_text(b"header")})],
)
def test_first_broadcast_uses_the_store_if_the_source_or_a_reply_is_not_known(metadata, source):
    group, store = copied(metadata, source)
    assert group.start_broadcast(b"content", 0)() == Broadcast(b"content", [b"reply"])
    assert store.exchange.called


def test_values_of_a_state_copy_on_one_host_need_no_store():
    session = Session(
        dataclasses.replace(worker_settings.read({}), elastic=True),
        create_autospec(Link, instance=True),
    )
    session.recovery.phase = Phase.TRAINING
    session.recovery.place = Place(1, 4, 0, 2, 1, 2)
    session.recovery.provisional = False
    groups: Any = create_autospec(Groups, instance=True)
    session.groups = groups
    group = GuardedGroups(session, ProgressCounter()).copy_group(STATE, (1, 3))
    assert group is groups.find.return_value
