"""Connections of a rank to the rendezvous store, with real sockets."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address
from elastic.rendezvous import store as stores
from elastic.rendezvous.store import Call, Store, listen
from harness.ports import free_port

SECRET = b"secret"
WAIT_S = 20.0


class Watched(Call):
    """A request that records whether it used a kept connection."""

    def connect(self, kept: Any, *arguments: Any) -> None:
        self.kept = kept is not None
        super().connect(kept, *arguments)
        self.used = self._socket


def fetch(store: Store) -> bool:
    """Fetch a value, and return whether no new connection was needed."""
    call = Watched()
    assert store.exchange("value", 1, 0, b"", call=call) == [b"7"]
    return call.kept


@pytest.fixture
def served() -> Iterator[Store]:
    listener = listen("127.0.0.1")
    store = Store(listener.address, listener, WAIT_S, secret=SECRET)
    store.provide("value", lambda: [b"7"])
    store.open()
    yield store
    store.close()


@pytest.fixture
def keeping(served: Store) -> Iterator[Store]:
    store = Store(served.address, None, WAIT_S, secret=SECRET, keeps=2)
    yield store
    store.close()


def test_later_exchanges_reuse_the_kept_connection(keeping):
    assert [fetch(keeping) for _ in range(3)] == [False, True, True]


def test_without_keeping_each_exchange_connects(served):
    plain = Store(served.address, None, WAIT_S, secret=SECRET)
    assert [fetch(plain) for _ in range(2)] == [False, False]


def test_an_idle_connection_is_not_used_any_more(keeping, monkeypatch):
    assert not fetch(keeping)
    monkeypatch.setattr(stores, "KEPT_S", 0.0)
    assert not fetch(keeping)


def serving(address: Address) -> Store:
    store = Store(address, listen(address.host, address.port), WAIT_S, secret=SECRET)
    store.provide("value", lambda: [b"7"])
    store.open()
    return store


def test_kept_connection_that_was_closed_at_the_other_end_is_not_used_any_more():
    address, first = Address("127.0.0.1", free_port()), Watched()
    served = serving(address)
    keeping = Store(address, None, WAIT_S, secret=SECRET, keeps=2)
    keeping.exchange("value", 1, 0, b"", call=first)
    served.close()
    poll = select.poll()
    assert first.used is not None
    poll.register(first.used, select.POLLIN)
    assert poll.poll(1000 * WAIT_S)
    served = serving(address)
    try:
        assert not fetch(keeping)
    finally:
        keeping.close()
        served.close()


def test_a_failed_exchange_keeps_no_connection(keeping):
    with pytest.raises(CollectiveFailed):
        keeping.exchange("unknown", 1, 0, b"")
    assert not fetch(keeping)


def test_an_aborted_store_keeps_no_connection(served, keeping):
    assert not fetch(keeping)
    keeping.abort()
    with pytest.raises(CollectiveFailed) as caught:
        fetch(keeping)
    assert caught.value.aborted


def test_connections_that_were_started_ahead_are_used_as_soon_as_the_store_is_served():
    listener = listen("127.0.0.1")
    sockets = stores.connect_ahead(listener.address, 2)
    assert len(sockets) == 2
    served = Store(listener.address, listener, WAIT_S, secret=SECRET)
    served.provide("value", lambda: [b"7"])
    served.open()
    ahead = Store(listener.address, None, WAIT_S, secret=SECRET, keeps=2, connecting=sockets)
    used: list[Any] = []
    try:
        for _ in range(2):
            call = Watched()
            assert ahead.exchange("value", 1, 0, b"", call=call) == [b"7"]
            used.append(call.kept)
    finally:
        ahead.close()
        served.close()
    assert used == [True, True]
    assert all(sock.fileno() == -1 for sock in sockets)


def test_connection_that_was_refused_is_made_again_once_a_store_listens():
    address = Address("127.0.0.1", free_port())
    sockets = stores.connect_ahead(address, 1)
    served = Store(address, listen(address.host, address.port), WAIT_S, secret=SECRET)
    served.provide("value", lambda: [b"7"])
    served.open()
    ahead = Store(address, None, WAIT_S, secret=SECRET, keeps=2, connecting=sockets)
    try:
        assert ahead.exchange("value", 1, 0, b"") == [b"7"]
    finally:
        ahead.close()
        served.close()


def test_request_when_aborted_before_it_connects_then_it_does_not_wait_for_a_connection():
    kept, call = create_autospec(stores._Connection, instance=True), Call()
    kept.socket = create_autospec(socket.socket, instance=True)
    call.abort()
    with pytest.raises(OSError):
        call.connect(kept, Address("127.0.0.1", 1), SECRET, time.monotonic() + WAIT_S)
    assert not kept.established.called
    call.close()
    assert kept.socket.close.called
