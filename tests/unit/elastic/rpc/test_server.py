"""The server of sealed frames, turn by turn, over real sockets: the test is its thread."""

from __future__ import annotations

import selectors
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.messages import ProtocolError
from elastic.rpc import server as server_module
from elastic.rpc.server import SealedServer

SECRET = b"k" * 32
LARGE = bytes(8 << 20)  # more than a socket takes at once
NUMBERS: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(int)
BODIES: msgspec.msgpack.Decoder[bytes] = msgspec.msgpack.Decoder(bytes)
encoded = msgspec.msgpack.encode


class Caller:
    """The other end; ``number`` is its first message."""

    def __init__(self, served: Served, number: int, secret: bytes = SECRET) -> None:
        self._served = served
        nonce = bytes([number]) * NONCE_BYTES
        self.wire = FramedConnection(BODIES)
        self.wire.seal(secret, mine=nonce, theirs=b"", caller=True, limit=1 << 30)
        self.socket = socket.create_connection(served.address, 10)
        self.socket.sendall(nonce + self.wire.frame_of(encoded(number)))
        served.closing.append(self.socket)

    def next(self) -> Any:
        """Return the next message, or None at the end of the connection. The server has its turns meanwhile."""
        while (message := self.wire.next()) is None:
            self._served.turn()
            self.socket.setblocking(False)
            try:
                data = self.socket.recv(1 << 20)
            except BlockingIOError:
                continue
            if not data:
                return None
            self.wire.feed(data)
        return message


class Served:
    """A server that accepts callers with positive numbers, and what it has reported."""

    def __init__(self, first_s: float = 60.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.callers: dict[int, Any] = {}
        self.received: list[tuple[int, int]] = []
        self.lost: list[int] = []
        self.closing: list[socket.socket] = []
        self.server = SealedServer(
            listener,
            "served",
            NUMBERS,
            SECRET,
            received=self._received,
            lost=lambda caller: self.lost.append(caller.identity),
            first_limit=256,
            first_s=first_s,
            idle_s=0.01,
        )

    def _received(self, caller, number) -> None:
        if caller.identity is not None:
            self.received.append((caller.identity, number))
            return
        if number < 1:
            raise ProtocolError("not a number of a caller")
        caller.identity = number
        self.callers[number] = caller

    def turn(self) -> None:
        self.server._turn()

    def call(self, number: int) -> Caller:
        caller = Caller(self, number)
        while number not in self.callers:
            self.turn()
        return caller

    def close(self) -> None:
        for each in self.closing:
            each.close()
        self.server.close_sockets()


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


def test_caller_that_does_not_read_delays_no_other_and_gets_all_messages(served):
    slow, quick = served.call(1), served.call(2)
    for body in (LARGE, b"then"):
        served.server.send(served.callers[1], encoded(body))
    served.server.send(served.callers[2], encoded(b"at once"))
    assert quick.next() == b"at once"
    assert [slow.next(), slow.next()] == [LARGE, b"then"]


def test_messages_of_a_caller_arrive_in_order_before_its_loss(served):
    caller = served.call(1)
    caller.socket.sendall(b"".join(caller.wire.frame_of(encoded(n)) for n in range(3)))
    caller.socket.close()
    while not served.lost:
        served.turn()
    assert served.received == [(1, 0), (1, 1), (1, 2)]
    assert served.lost == [1]
    served.server.send(served.callers[1], encoded(b"to nobody"))


def test_queued_messages_are_sent_when_the_server_closes(served, monkeypatch):
    monkeypatch.setattr(server_module, "FLUSH_S", 60.0)
    caller = served.call(1)
    served.server.send(served.callers[1], encoded(LARGE))
    served.server.start()
    while (message := caller.wire.next()) is None:
        served.server.close(within_s=0.0)
        served.server.send(served.callers[1], encoded(b"by another thread, meanwhile"))
        caller.socket.settimeout(10)
        caller.wire.feed(caller.socket.recv(1 << 20))
    assert message == LARGE
    assert served.lost == []


def test_callers_that_do_not_read_delay_no_other_at_the_end(served, monkeypatch):
    monkeypatch.setattr(server_module, "END_S", 600.0)
    *_, quick = (served.call(number) for number in range(1, 5))
    for caller in served.callers.values():
        served.server.send(caller, encoded(LARGE))
    everything = threading.Event()

    class Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            assert timeout == server_module.FLUSH_S
            while not (ready := super().select(0.01)) and not everything.is_set():
                pass
            return ready

    def read() -> None:
        quick.socket.settimeout(60)
        while quick.wire.next() is None:
            quick.wire.feed(quick.socket.recv(1 << 20))
        everything.set()

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    served.server.close(within_s=0.0)
    reader = threading.Thread(target=read)
    reader.start()
    served.server._serve()
    reader.join(60)
    assert everything.is_set()
    assert [caller.identity for caller in served.server._unsent] == [1, 2, 3]


class WatchedLock:
    """A lock that counts the attempts to acquire it."""

    def __init__(self) -> None:
        self.attempts = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.attempts.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_end_when_another_thread_is_sending_then_its_frame_is_sent_once(served, monkeypatch):
    caller, resume, real = served.call(1), threading.Event(), server_module._Unsent.send

    def send(unsent: Any, sock: socket.socket) -> None:
        assert resume.wait(30)
        real(unsent, sock)

    monkeypatch.setattr(server_module._Unsent, "send", send)
    served.server._sending = lock = WatchedLock()
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(served.server.send, served.callers[1], encoded(b"last"))
        assert lock.attempts.acquire(timeout=30)
        ended = threads.submit(served.server._send_rest)
        assert lock.attempts.acquire(timeout=30)
        resume.set()
        sent.result(30)
        ended.result(30)
    assert caller.next() == b"last"


def test_a_body_for_many_callers_is_held_once(served):
    callers = [served.call(number) for number in range(1, 9)]
    body = encoded(LARGE)
    tracemalloc.start()
    try:
        for caller in served.callers.values():
            served.server.send(caller, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(body), "and one copy while a tag is computed"
    assert [each.next() for each in callers] == [LARGE] * len(callers)


def test_each_caller_is_tried_once_per_turn(served, monkeypatch):
    callers = [served.call(number) for number in range(1, 5)]
    for caller in served.callers.values():
        served.server.send(caller, encoded(LARGE))
    tries, most, left = [0], 0, {caller: len(LARGE) for caller in callers}
    more = served.server._send_more

    def counted() -> None:
        tries[0] += 1
        more()

    monkeypatch.setattr(served.server, "_send_more", counted)
    while left:
        for caller in [*left]:
            caller.socket.settimeout(10)
            left[caller] -= len(caller.socket.recv(1 << 20))
            if left[caller] <= 0:
                del left[caller]
        tries[0] = 0
        served.turn()
        most = max(most, tries[0])
    assert most == 1


def test_a_caller_with_too_much_unread_is_dropped(served, monkeypatch):
    monkeypatch.setattr(server_module, "UNSENT_LIMIT", 1 << 20)
    served.call(1)
    served.server.send(served.callers[1], encoded(LARGE))
    while not served.lost:
        served.turn()
    assert served.lost == [1]


def test_heartbeats_are_sent_only_to_authenticated_callers_with_an_empty_queue(served):
    idle, busy = served.call(1), served.call(2)
    stranger = socket.create_connection(served.address, 10)
    served.closing.append(stranger)
    served.server.send(served.callers[2], encoded(LARGE))
    served.turn()
    served.server.beat()
    idle.socket.settimeout(10)
    assert len(idle.socket.recv(100)) == 20, "the head and the tag of an empty frame"
    assert busy.next() == LARGE
    stranger.setblocking(False)
    with pytest.raises(BlockingIOError):
        stranger.recv(1)


@pytest.mark.parametrize(("number", "secret"), [(0, SECRET), (1, b"another")])
def test_refused_caller_is_dropped_and_not_reported_as_lost(served, number, secret):
    assert Caller(served, number, secret).next() is None
    assert (served.callers, served.lost, served.server.pending.all()) == ({}, [], [])


def test_a_silent_caller_is_dropped_in_time():
    made = Served(first_s=0.0)
    with socket.create_connection(made.address, 10) as silent:
        deadline = time.monotonic() + 60
        silent.setblocking(False)
        closed = False
        while not closed and time.monotonic() < deadline:
            made.turn()
            try:
                closed = silent.recv(1) == b""
            except BlockingIOError:
                continue
        assert closed
    made.close()
