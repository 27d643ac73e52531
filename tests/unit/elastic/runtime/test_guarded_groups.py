"""Names of what the ranks of a world exchange through its store."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.collectives import threads_at_exit
from elastic.collectives.groups import group_factory
from elastic.collectives.store_group import DistantGroup
from elastic.protocol.messages import STATE, Place
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import Store
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.driver_connection import Link
from elastic.runtime.guarded_groups import GuardedGroups, StoreExchange
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
