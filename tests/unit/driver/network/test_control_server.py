"""Control server over real sockets on loopback: authentication, received messages, and the end of connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator
from typing import ClassVar

import msgspec
import pytest

from elastic.driver.network import control_connection
from elastic.driver.network.control_server import WORKERS, ControlServer
from elastic.protocol import messages as protocol
from elastic.protocol.framing import proof
from elastic.protocol.messages import Address, Commit, Place, Worker
from harness.golden import recorded
from stress.fuzz.server import Caller

SECRET = b"s" * 32
A, B = Worker("localhost", 0), Worker("localhost", 1)
DEADLINE_S = 60.0


class Peer(Caller):
    """A worker's end of a connection, step by step."""

    opened: ClassVar[list[Peer]] = []
    answer_s = DEADLINE_S

    def __init__(self, reader, writer) -> None:
        super().__init__(reader, writer)
        self.opened.append(self)

    @classmethod
    async def reach(cls, address: Address) -> Peer:
        return cls(*await asyncio.open_connection(address.host, address.port))

    def say(self, *messages) -> None:
        self.writer.write(b"".join(self.wire.frame(m) for m in messages))

    async def answer(self, worker=A, *, secret=SECRET, role="worker", nonce=b"n" * 32, **changes):
        challenge = await self.hear()
        assert isinstance(challenge, protocol.Challenge) and len(challenge.nonce) == 32
        mine = proof(secret, role, challenge.nonce, nonce, str(worker))
        self.say(protocol.Answer(worker, nonce, mine, **changes))
        return challenge, nonce

    async def enter(self, worker=A) -> Peer:
        challenge, nonce = await self.answer(worker)
        expected = proof(SECRET, "driver", nonce, challenge.nonce, str(worker))
        assert await self.hear() == protocol.Accepted(expected)
        self.wire.seal(SECRET, mine=nonce, theirs=challenge.nonce, caller=True)
        return self


class Driver:
    """Records the events that the event loop would receive."""

    def __init__(self) -> None:
        self.events: asyncio.Queue = asyncio.Queue()
        self.log: list[str] = []
        self.expected = {A, B}
        self.server = ControlServer(
            secret=SECRET, log=lambda level, text: self.log.append(text), callers=WORKERS
        )
        self.address = Address("", 0)

    async def next(self):
        return await asyncio.wait_for(self.events.get(), DEADLINE_S)

    async def worker(self, worker=A) -> Peer:
        return await (await Peer.reach(self.address)).enter(worker)


@contextlib.asynccontextmanager
async def driving() -> AsyncIterator[Driver]:
    driver = Driver()
    driver.address = await driver.server.open(
        "127.0.0.1",
        received=lambda worker, message: driver.events.put_nowait((worker, message)),
        gone=lambda worker, silent: driver.events.put_nowait(
            (worker, "silent" if silent else "gone")
        ),
        expected=driver.expected.__contains__,
    )
    try:
        yield driver
    finally:
        await driver.server.close()
        while Peer.opened:
            writer = Peer.opened.pop().writer
            writer.close()
            with contextlib.suppress(OSError):
                await asyncio.wait_for(writer.wait_closed(), DEADLINE_S)


def conversation(test):
    """Run an async test with a driver."""

    async def run() -> None:
        async with driving() as driver:
            await test(driver)

    run.__name__ = test.__name__
    return run


@conversation
async def test_authenticated_worker_is_accepted(driver):
    peer = await driver.worker()
    peer.say(protocol.Hello(A, pid=7), protocol.Failed(2, "reset"))
    assert await driver.next() == (A, protocol.Hello(A, pid=7))
    assert await driver.next() == (A, protocol.Failed(2, "reset"))
    assert driver.server.send(A, protocol.Broken(2, "lost"))
    assert await peer.hear() == protocol.Broken(2, "lost")
    peer.writer.close()
    assert await driver.next() == (A, "gone")
    assert not driver.server.send(A, protocol.Broken(3, "late"))


@conversation
async def test_authenticated_peer_that_does_not_belong_here_receives_the_reason(driver):
    peer, stranger = await Peer.reach(driver.address), Worker("localhost", 0, 2)
    challenge, nonce = await peer.answer(stranger)
    reason = "localhost:0#2 is not a worker of this job: connect it to the driver of its own job"
    own = proof(SECRET, "turned away", nonce, challenge.nonce, reason)
    assert await peer.hear() == protocol.TurnedAway(reason, own)
    assert await peer.hear() is None
    assert reason in driver.log[0]


@conversation
async def test_world_when_sent_then_each_member_receives_its_own_place(driver):
    places = {A: Place(0, 2, 0, 2, 0, 1), B: Place(1, 2, 1, 2, 0, 1)}
    peers = {worker: await driver.worker(worker) for worker in places}
    world = protocol.World(3, places[A], Address("h", 1), 0, None, "all are ready")
    driver.server.send_world(world, [*places.items(), (Worker("elsewhere", 0), places[A])])
    for worker, peer in peers.items():
        assert await peer.hear() == msgspec.structs.replace(world, place=places[worker])


@conversation
async def test_broadcast_reaches_all_connected_workers(driver):
    a, b = await driver.worker(A), await driver.worker(B)
    driver.server.broadcast([A, Worker("elsewhere", 0), B], protocol.Finish(3))
    assert await a.hear() == await b.hear() == protocol.Finish(3)


@pytest.mark.parametrize(
    "changes", [{"secret": b"guess" * 8}, {"role": "driver"}, {"nonce": b"short"}, {"version": 99}]
)
async def test_unauthenticated_peers_are_rejected(changes):
    async with driving() as driver:
        peer = await Peer.reach(driver.address)
        await peer.answer(**changes)
        assert await peer.hear() is None
        assert len(driver.log) == 1
        recorded("log", driver.log[0])
        assert driver.events.empty()


async def test_proof_cannot_be_replayed():
    async with driving() as driver:
        peer = await Peer.reach(driver.address)
        first = await peer.hear()
        mine = proof(SECRET, "worker", first.nonce, b"n" * 32, str(A))
        thief = await Peer.reach(driver.address)
        await thief.hear()
        thief.say(protocol.Answer(A, b"n" * 32, mine))
        assert await thief.hear() is None


@conversation
async def test_rejections_share_one_line(driver):
    for _ in range(5):
        peer = await Peer.reach(driver.address)
        peer.say(protocol.Hello(A, 1))
        await peer.hear()
        assert await peer.hear() is None
    assert len(driver.log) == 1
    recorded("log", driver.log[0])


@conversation
async def test_little_is_read_before_a_proof(driver):
    for data in (b"\xff" * 4, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1" + b"\xc1", b"\0\0\4\0" * 300):
        peer = await Peer.reach(driver.address)
        await peer.hear()
        peer.writer.write(data)
        assert await peer.hear() is None, data
    assert driver.events.empty()


@conversation
async def test_message_after_the_answer_is_rejected_before_acceptance(driver):
    peer = await Peer.reach(driver.address)
    challenge = await peer.hear()
    mine = proof(SECRET, "worker", challenge.nonce, b"n" * 32, str(A))
    peer.say(protocol.Answer(A, b"n" * 32, mine), protocol.Hello(A, 1))
    assert await peer.hear() is None
    assert driver.events.empty()


async def test_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(control_connection, "HANDSHAKE_S", 0.05)
    async with driving() as driver:
        peer = await Peer.reach(driver.address)
        await peer.hear()
        assert await peer.hear() is None
        recorded("log", driver.log[0])


@conversation
async def test_worker_has_one_connection(driver):
    first = await driver.worker()
    second = await Peer.reach(driver.address)
    await second.answer(A)
    recorded("messages", (await second.hear()).reason)
    assert await second.hear() is None
    recorded("log", driver.log[0])
    first.writer.close()
    assert await driver.next() == (A, "gone")
    await driver.worker()  # init() after shutdown()


@conversation
async def test_new_connection_is_accepted_directly_after_the_old_one_is_closed(driver):
    for _ in range(20):
        peer = await driver.worker()
        peer.writer.close()
    assert not driver.log


def changed(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


@pytest.mark.parametrize(
    "data",
    [
        lambda wire: b"\xff\xff\xff\xff",
        lambda wire: wire.frame_of(b"\xc1"),
        lambda wire: wire.frame(protocol.Finish(1)),
        lambda wire: wire.frame(protocol.Hello(B, 1)),
        lambda wire: changed(wire.frame(protocol.Hello(A, 1))),
    ],
)
async def test_invalid_data_after_the_proof_closes_the_connection(data):
    async with driving() as driver:
        peer = await driver.worker()
        peer.writer.write(data(peer.wire))
        assert await driver.next() == (A, "gone")
        assert await peer.hear() is None
        assert str(A) in driver.log[0]
        recorded("log", driver.log[0])


@conversation
async def test_large_result_arrives_complete(driver):
    peer = await driver.worker()
    blob = bytes(range(256)) * 40_000
    peer.say(protocol.SendResult(blob))
    assert await driver.next() == (A, protocol.SendResult(blob))


@conversation
async def test_last_messages_are_received_before_the_loop_polls_the_socket(driver):
    peer = await driver.worker()
    digested = protocol.Digested(1, Commit(1, 2), digest=3)
    # From here on the loop does not run: the bytes wait in the socket, as when an exit is observed first.
    peer.writer.get_extra_info("socket")._sock.send(peer.wire.frame(digested))
    peer.writer.transport.abort()
    driver.server.drain(A)
    assert driver.events.get_nowait() == (A, digested)
    await asyncio.sleep(0)
    driver.server.drain(A)  # the end of the stream arrived meanwhile
    assert await driver.next() == (A, "gone")
    assert driver.events.empty()


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "gone"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "gone"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route"), "silent"),
    ],
)
async def test_unresponsive_host_is_distinguished_from_a_closed_connection(error, end):
    async with driving() as driver:
        await driver.worker()
        driver.server._connections[A].connection_lost(error)  # as called by the event loop
        assert await driver.next() == (A, end)


@conversation
async def test_tcp_keepalive_is_enabled(driver):
    await driver.worker()
    connected = driver.server._connections[A]._socket
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 1),
        (socket.TCP_USER_TIMEOUT, 2000),
    ):
        assert connected.getsockopt(socket.IPPROTO_TCP, option) == value


async def test_peer_that_does_not_read_is_disconnected(monkeypatch):
    monkeypatch.setattr(control_connection, "BACKLOG_LIMIT", 1 << 20)
    async with driving() as driver:
        await driver.worker()
        message = protocol.End("x" * (1 << 20))
        while driver.server.send(A, message):
            pass
        assert await driver.next() == (A, "gone")
        recorded("log", driver.log[0])


@conversation
async def test_close_sends_pending_messages(driver):
    peer = await driver.worker()
    driver.server.send(A, protocol.End("over"))
    await driver.server.close()
    assert await peer.hear() == protocol.End("over")
    assert await peer.hear() is None
    assert driver.events.empty()


@conversation
async def test_broadcast_to_four_workers_is_fast(driver):
    workers = [Worker("localhost", n) for n in range(4)]
    driver.expected |= set(workers)
    peers = [await driver.worker(worker) for worker in workers]
    times = []
    for n in range(20):
        began = time.perf_counter()
        driver.server.broadcast(workers, protocol.Broken(n, "lost localhost:2#1"))
        times.append(time.perf_counter() - began)
        for peer in peers:
            assert await peer.hear() == protocol.Broken(n, "lost localhost:2#1")
    assert min(times) < 1e-3


def test_driver_on_uvloop_authenticates_a_worker():
    loop = pytest.importorskip("uvloop").new_event_loop()
    try:
        loop.run_until_complete(
            asyncio.wait_for(test_authenticated_worker_is_accepted(), DEADLINE_S)
        )
    finally:
        loop.close()
