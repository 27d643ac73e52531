"""Server of control connections, which performs the handshake and exchanges authenticated frames. Makes no decisions.

    connected --Challenge-->   waiting for an Answer: HANDSHAKE_LIMIT bytes, HANDSHAKE_S seconds, TLS included
    Answer    --Accepted-->    open: each message goes to ``received``
              --TurnedAway-->  closed: the caller knows the secret, but is not expected
    connection closed or failed, or invalid message: ``gone`` is called once

Each host's kernel acknowledges a small packet every second, independently of its processes. If nothing is acknowledged
for ``lease_s``, the connection ends with a timeout, and ``gone`` is called with ``silent``.

Callers are workers or agents, and `Callers` describes how they identify themselves. The caller's proof is
``proof(secret, role, challenge.nonce, answer.nonce, name)``, and the server's proof is ``proof(secret, "driver",
answer.nonce, challenge.nonce, name)``. A caller sends no messages between its Answer and the server's Accepted.

`elastic.protocol.pending_handshakes` limits the number of unauthenticated connections: beyond the limit, a new
connection replaces the oldest one. After at most ACCEPTED_AT_ONCE new connections, authenticated connections are served
again.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import socket
import ssl
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from elastic.driver.network.control_connection import (
    HANDSHAKE_S,
    TLS_HANDSHAKE_LIMIT,
    Connection,
    is_silence,
)
from elastic.driver.output_interfaces import Log
from elastic.driver.settings import Settings
from elastic.protocol.framing import NONCE_BYTES, proof
from elastic.protocol.messages import (
    HANDSHAKE_LIMIT,
    VERSION,
    Accepted,
    Address,
    Answer,
    Challenge,
    Hello,
    Place,
    ProtocolError,
    TurnedAway,
    Worker,
    World,
    encoded,
    from_worker,
)
from elastic.protocol.pending_handshakes import PendingHandshakes, count_limit

# maximum number of connections that the kernel queues before they are accepted
WAITING_LIMIT = 4096
ACCEPTED_AT_ONCE = 64
REFUSALS_S = 5.0  # minimum interval between two log lines about refused connections, in seconds
CLOSE_S = 1.0
SECOND = (
    "has a connection already: this process is a child of that worker. Call init() in the worker only, not in its"
    " children; a spawned DataLoader worker imports the script again, so keep init() out of module level, under"
    " if __name__ == '__main__'"
)


PeerId = TypeVar("PeerId", bound=Hashable)


@dataclass(frozen=True)
class Callers(Generic[PeerId]):
    """Description of the callers of a server: whether they are workers or agents, and how they identify themselves."""

    role: str  # role that the callers use in their proof
    decoder: msgspec.msgpack.Decoder[Any]  # decoder of the callers' messages
    # type of the callers' answer to the challenge, with ``nonce``, ``proof`` and ``version``
    answer: type[Any]
    peer_of: Callable[[Any], PeerId]  # function that extracts the identity from an answer
    # Whether a new connection replaces an open one of the same caller, whose loss the server may not have detected yet.
    replaces: bool = False
    # Whether a refused caller that knows the secret receives a TurnedAway message with the reason.
    sends_reason: bool = False


WORKERS: Callers[Worker] = Callers(
    "worker", from_worker, Answer, lambda answer: answer.worker, sends_reason=True
)


class ControlServer(Generic[PeerId]):
    """Server for workers or for agents.

    Args:
        secret: the job's secret. Messages of callers that cannot prove knowledge of it are ignored.
        log: called with the level and the text of each log line.
        callers: description of the callers.
        lease_s: liveness timeout, in seconds.
        tls: TLS context. Without it, messages are authenticated but not encrypted.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        log: Log,
        callers: Callers[PeerId],
        lease_s: float = Settings.lease_s,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.secret = secret
        self.lease_s = lease_s
        self.callers = callers
        self.decoder = callers.decoder
        self.tls = tls
        self._log = log
        self._received: Callable[[PeerId, Any], None] = lambda peer, message: None
        self._gone: Callable[[PeerId, bool], None] = lambda peer, silent: None
        self._expected: Callable[[PeerId], bool] = lambda peer: False
        self._accepted: Callable[[PeerId], None] = lambda peer: None
        self._listening: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[PeerId, Connection[PeerId]] = {}
        bytes_each = HANDSHAKE_LIMIT if tls is None else TLS_HANDSHAKE_LIMIT
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._strangers: PendingHandshakes[Connection[PeerId]] = PendingHandshakes(
            HANDSHAKE_S, count_limit(bytes_each, descriptors)
        )
        self._refused = 0  # number of refused connections that were not logged yet
        self._refused_at = float("-inf")

    def bind(self, interface: str, port: int = 0) -> Address:
        """Bind an address before `open` listens on it, so that it can already be announced.

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        if self._listening is None:
            self._listening = _bound(interface, port)
        bound: tuple[str, int] = self._listening.getsockname()[:2]
        return Address(bound[0], bound[1])

    async def open(
        self,
        interface: str,
        port: int = 0,
        *,
        received: Callable[[PeerId, Any], None],
        gone: Callable[[PeerId, bool], None],
        expected: Callable[[PeerId], bool],
        accepted: Callable[[PeerId], None] = lambda peer: None,
    ) -> Address:
        """Listen on an address, and return it. All callbacks are called in the event loop's thread.

        Args:
            interface: numeric address.
            port: port number. 0 lets the system choose one.
            received: called with each message of a caller.
            gone: called once when a caller's connection ends, with the caller and whether its host stopped responding.
            expected: called with a caller. Returns whether it may connect.
            accepted: called with each authenticated caller.

        Raises:
            OSError: the address cannot be bound.
        """
        self._received, self._gone, self._expected = received, gone, expected
        self._accepted = accepted
        loop = asyncio.get_running_loop()
        self.bind(interface, port)
        assert self._listening is not None
        listening = self._listening
        self._server = await loop.create_server(
            lambda: Connection(self, loop), sock=listening, backlog=ACCEPTED_AT_ONCE
        )
        # asyncio uses the same number as length of the kernel's queue and as number of connections accepted at once, so
        # the length is set separately.
        listening.listen(WAITING_LIMIT)
        return self.bind(interface, port)

    def send(self, peer: PeerId, *messages: msgspec.Struct) -> bool:
        """Send messages to a caller without blocking, in one write.

        If the caller is not connected, the messages are dropped and the result is False.
        """
        connection = self._connections.get(peer)
        return connection is not None and connection.write(*map(encoded, messages))

    def send_each(self, messages: Iterable[tuple[PeerId, msgspec.Struct]]) -> None:
        """Send a message to each of several callers. Callers without a connection are skipped."""
        for peer, message in messages:
            self.send(peer, message)

    def send_world(self, world: World, places: Iterable[tuple[PeerId, Place]]) -> None:
        """Send a new world to each member, with the member's place in it."""
        self.send_each((peer, msgspec.structs.replace(world, place=each)) for peer, each in places)

    def broadcast(self, peers: Iterable[PeerId], message: msgspec.Struct) -> None:
        """Send a message to each of these callers that is connected. The message is encoded only once."""
        body = encoded(message)
        for peer in peers:
            connection = self._connections.get(peer)
            if connection is not None:
                connection.write(body)

    def connected(self, peer: PeerId) -> bool:
        return peer in self._connections

    def peer(self, worker: PeerId) -> str:
        """Return the numeric address of a caller, or an empty string if the caller is not connected."""
        connection = self._connections.get(worker)
        return "" if connection is None else connection.peer.rpartition(":")[0].strip("[]")

    def drain(self, peer: PeerId) -> None:
        """Process the data that a caller has already sent, because it may have sent messages just before it exited."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.drain()

    def disconnect(self, peer: PeerId) -> None:
        """Close the connection of a caller. ``gone`` is called before this method returns."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.end()

    async def close(self) -> None:
        """Stop listening, send buffered data for at most CLOSE_S seconds, and close all connections.

        ``gone`` is not called.
        """
        self._gone = lambda peer, silent: None
        if self._server is not None:
            self._server.close()
        for connection in self._strangers.all():
            connection.end()
        # A worker that does not read must not block the exit of the driver.
        deadline = asyncio.get_running_loop().time() + CLOSE_S
        for connection in list(self._connections.values()):
            while connection.backlog and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.002)
            connection.end()
        # Let the transports close their sockets, which happens in the next iteration of the event loop.
        await asyncio.sleep(0)

    # ---- called by connections

    def opened(self, connection: Connection[PeerId]) -> None:
        oldest = self._strangers.add(connection, asyncio.get_running_loop().time())
        if oldest is not None:
            oldest.end("too many other connections were opened before it was authenticated")
        connection.write(encoded(Challenge(connection.nonce)))

    def authenticate(self, connection: Connection[PeerId], answer: Any) -> PeerId:
        """Return the caller that answered the challenge.

        Raises:
            ProtocolError: the caller is refused. The text of the error is the reason.
        """
        callers = self.callers
        if not isinstance(answer, callers.answer):
            raise ProtocolError(
                f"the peer sent {type(answer).__name__} before it was authenticated: install the same release on"
                " every host"
            )
        if answer.version != VERSION:
            raise ProtocolError(
                f"the peer uses protocol version {answer.version}, the driver version {VERSION}: install the same"
                " release on every host"
            )
        peer = callers.peer_of(answer)
        expected = proof(self.secret, callers.role, connection.nonce, answer.nonce, str(peer))
        # The nonce must have a fixed length. Otherwise, different values could produce the same text for the proof.
        if len(answer.nonce) != NONCE_BYTES or not hmac.compare_digest(answer.proof, expected):
            raise ProtocolError(
                f"the peer claims to be {peer}, but does not know the job's secret: check that it"
                " uses the same --secret-file"
            )
        if not self._expected(peer):
            raise self._turned_away(
                connection,
                answer,
                f"{peer} is not {_a(callers.role)} of this job: connect it to the driver of its"
                " own job",
            )
        # An earlier connection may be lost without the server having detected this.
        self.drain(peer)
        before = self._connections.get(peer)
        if before is not None:
            if not callers.replaces:
                raise self._turned_away(connection, answer, f"{peer} {SECOND}")
            before.abandon()
        self._strangers.remove(connection)
        self._connections[peer] = connection
        own = proof(self.secret, "driver", answer.nonce, connection.nonce, str(peer))
        connection.write(encoded(Accepted(own)))
        connection.wire.seal(self.secret, mine=connection.nonce, theirs=answer.nonce, caller=False)
        self._accepted(peer)
        return peer

    def _turned_away(
        self, connection: Connection[PeerId], answer: Any, reason: str
    ) -> ProtocolError:
        if self.callers.sends_reason:
            own = proof(self.secret, "turned away", answer.nonce, connection.nonce, reason)
            connection.write(encoded(TurnedAway(reason, own)))
        return ProtocolError(reason)

    def receive(self, peer: PeerId, message: Any) -> None:
        if isinstance(message, self.callers.answer):
            raise ProtocolError(
                "the peer sent a second Answer message: install the same release on every host"
            )
        if isinstance(message, Hello) and message.worker != peer:
            raise ProtocolError(
                f"the peer authenticated as {peer}, but its Hello message names {message.worker}: install the same"
                " release on every host"
            )
        self._received(peer, message)

    def lost(
        self,
        connection: Connection[PeerId],
        peer: PeerId | None,
        trouble: str,
        error: Exception | None,
    ) -> None:
        if peer is None:
            self._strangers.remove(connection)
            if trouble:
                self._refuse(connection.peer, trouble)
            return
        if trouble:
            self._log("warning", f"connection of {peer} closed: {trouble}")
        if self._connections.get(peer) is connection:
            del self._connections[peer]
            self._gone(peer, is_silence(error))

    def _refuse(self, peer: str, trouble: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._refused_at < REFUSALS_S:
            self._refused += 1
            return
        more = f" ({self._refused} others were rejected before)" if self._refused else ""
        self._refused_at, self._refused = now, 0
        self._log("warning", f"connection from {peer} rejected: {trouble}{more}")


def _a(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def _bound(interface: str, port: int) -> socket.socket:
    family, kind, number, _, address = socket.getaddrinfo(
        interface, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
