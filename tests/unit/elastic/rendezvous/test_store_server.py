"""The server of a world's store, turn by turn; the test decides which sockets are ready."""

from __future__ import annotations

import errno
import selectors
import socket
from unittest.mock import create_autospec

import msgspec
import pytest

from elastic.protocol.framing import NONCE_BYTES, FramedConnection, derived
from elastic.rendezvous import store
from elastic.rpc import server
from harness.golden import recorded

SECRET = b"k" * 32
FETCH, ANNOUNCE, LISTEN = 0, -1, -2


def fails():
    raise ValueError("no rules yet")


def asks(*sizes: int, key: str = "end") -> bytes:
    """Requests, as a caller sends them."""
    wire, nonce = FramedConnection(store._replies), bytes(NONCE_BYTES)
    wire.seal(derived(SECRET, "store", 0), mine=nonce, theirs=b"", caller=True, limit=1 << 20)
    requests = [store._Request(0, key, 0, size, b"now") for size in sizes]
    return nonce + b"".join(wire.frame_of(msgspec.msgpack.encode(each)) for each in requests)


def answered(caller):
    """Return the answer that a caller received."""
    wire = FramedConnection(store._replies)
    secret, nonce = derived(SECRET, "store", 0), bytes(NONCE_BYTES)
    wire.seal(secret, mine=nonce, theirs=b"", caller=True, limit=1 << 20)
    wire.feed(b"".join(caller.sendmsg.call_args.args[0]))
    return wire.next()


class Conversation:
    def __init__(self, monkeypatch):
        self.selector = create_autospec(selectors.DefaultSelector, instance=True)
        self.listener = create_autospec(socket.socket, instance=True)
        monkeypatch.setattr(selectors, "DefaultSelector", lambda: self.selector)
        pair = [create_autospec(socket.socket, instance=True) for _ in range(2)]
        monkeypatch.setattr(socket, "socketpair", lambda: pair)
        self.server = store._Server(
            self.listener, 0, SECRET, 30.0, {"end": lambda: [], "fails": fails}
        )

    def turn(self, *ready):
        self.selector.select.return_value = [
            (selectors.SelectorKey(each, 0, selectors.EVENT_READ, None), selectors.EVENT_READ)
            for each in ready
        ]
        self.server.rpc._turn()

    def calls(self):
        caller = create_autospec(socket.socket, instance=True)
        caller.sendmsg.side_effect = lambda parts, _, flags: sum(map(len, parts))
        self.listener.accept.side_effect = [(caller, ("10.0.0.2", 5000)), BlockingIOError]
        return caller

    def comes(self):
        caller = self.calls()
        self.turn(self.listener)
        return caller

    def says(self, caller, text):
        caller.recv.return_value = text
        return caller


@pytest.fixture
def talk(monkeypatch):
    return Conversation(monkeypatch)


def test_message_of_an_evicted_peer_does_not_affect_other_peers(monkeypatch):
    monkeypatch.setattr(server, "count_limit", lambda *_: 1)
    talk = Conversation(monkeypatch)
    stranger = talk.comes()
    caller = talk.calls()
    talk.turn(talk.listener, talk.says(stranger, b"x"))
    stranger.close.assert_called_once()
    talk.turn(talk.says(caller, asks(FETCH)))
    caller.sendmsg.assert_called_once()


def test_listener_that_disconnects_during_its_notification_affects_no_other(talk):
    listens, announces = talk.comes(), talk.comes()
    talk.turn(talk.says(listens, asks(LISTEN)))
    talk.turn(talk.says(announces, asks(ANNOUNCE)), talk.says(listens, b""))
    announces.sendmsg.assert_called_once()
    late = talk.comes()
    talk.turn(talk.says(late, asks(LISTEN)))
    late.sendmsg.assert_called_once()


def test_server_without_descriptors_accepts_later_and_serves_existing_peers(talk):
    caller = talk.comes()
    talk.listener.accept.side_effect = OSError(errno.EMFILE, "Too many open files")
    talk.turn(talk.listener, talk.says(caller, asks(FETCH)))
    talk.selector.unregister.assert_any_call(talk.listener)  # which stays ready: it would spin
    caller.sendmsg.assert_called_once()
    talk.turn()
    talk.selector.select.assert_called_with(server.DEAF_S)
    talk.selector.register.assert_called_with(talk.listener, selectors.EVENT_READ)
    talk.comes()
    talk.selector.select.assert_called_with(30.0)


def test_failing_provider_affects_only_its_caller(talk, caplog):
    asker, other = talk.comes(), talk.comes()
    talk.turn(talk.says(asker, asks(FETCH, key="fails")), talk.says(other, asks(FETCH)))
    error = "'fails' is not available: ValueError: no rules yet"
    assert answered(asker) == store._Reply(0, "fails", [], error)
    assert answered(other) == store._Reply(0, "end", [])
    recorded("log", caplog.text)


def test_caller_may_send_further_requests_after_an_answer(talk):
    caller = talk.comes()
    talk.turn(talk.says(caller, asks(FETCH, ANNOUNCE, FETCH)))
    assert caller.sendmsg.call_count == 3
    caller.close.assert_not_called()


def test_caller_that_sends_a_request_before_the_answer_is_dropped(talk):
    caller = talk.comes()
    talk.turn(talk.says(caller, asks(LISTEN, FETCH)))
    caller.sendmsg.assert_not_called()
    caller.close.assert_called_once()
