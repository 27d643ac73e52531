"""Connections over which collectives are negotiated: one from every rank to rank 0, for one generation.

The address of rank 0 is in the generation's store. Frames are those of `elastic.protocol.framing`: authenticated from
the first one, which proves that the caller knows the job's secret, validated against their schema, never pickled.
Blocking calls end with `abort`, from any thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from elastic.errors import CollectiveFailed
from elastic.negotiation.fusion import FusionLimits
from elastic.negotiation.messages import RequestList, ResponseList
from elastic.protocol.framing import NONCE_BYTES, AcceptedConnection, FramedConnection, derived
from elastic.protocol.messages import ProtocolError
from elastic.protocol.pending_handshakes import PendingHandshakes, count_limit
from elastic.rendezvous.store import Store, StoreListener

_FRAME_LIMIT = 256 << 20  # bytes
_HELLO_LIMIT = 256  # bytes, before the peer is authenticated
_HELLO_S = 10.0
_UNSENT_LIMIT = 256 << 20  # unsent bytes per rank; beyond that its connection is closed
_READ_BYTES = 1 << 16
KEY = "negotiation"  # key of the store under which rank 0 publishes its rules
LOOK_S = 1.0  # seconds between two checks for collectives that make no progress
BEAT_S = 5.0  # seconds between two heartbeats of rank 0
_LISTENS = 30  # consecutive receive timeouts before rank 0 counts as lost

_encoder = msgspec.msgpack.Encoder()
_offers: msgspec.msgpack.Decoder[RequestList] = msgspec.msgpack.Decoder(RequestList)


class ControllerSettings(msgspec.Struct, frozen=True, array_like=True):
    """Settings that rank 0 publishes to all: its address, and the limits of fusion."""

    host: str
    port: int
    nonce: bytes
    fusion_bytes: int
    alone_bytes: int
    groups: bool

    @property
    def limits(self) -> FusionLimits:
        return FusionLimits(self.fusion_bytes, self.alone_bytes, self.groups)


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    rank: int


_hellos: msgspec.msgpack.Decoder[_Hello] = msgspec.msgpack.Decoder(_Hello)
_decisions: msgspec.msgpack.Decoder[ResponseList] = msgspec.msgpack.Decoder(ResponseList)


def rules_of(listener: StoreListener, limits: FusionLimits) -> ControllerSettings:
    """Return rank 0's settings."""
    where = listener.address
    nonce = os.urandom(NONCE_BYTES)
    return ControllerSettings(
        where.host, where.port, nonce, limits.fusion_bytes, limits.alone_bytes, limits.groups
    )


def encode_rules(rules: ControllerSettings) -> bytes:
    return _encoder.encode(rules)


def fetch_rules(store: Store, rank: int, timeout_s: float | None = None) -> ControllerSettings:
    """Fetch rank 0's rules; rank 0 need not have called a collective yet. Raises CollectiveFailed."""
    try:
        return msgspec.msgpack.decode(store.fetch(KEY, rank, timeout_s)[0], type=ControllerSettings)
    except (msgspec.MsgspecError, IndexError) as error:
        raise CollectiveFailed(f"rank 0's negotiation settings are corrupted: {error}") from error


class ControllerClient:
    """A rank's end of the connection. One thread receives at a time; another may send.

    Rank 0 counts as lost after ``silence_s`` seconds without a message or heartbeat; 0: never.
    """

    def __init__(
        self,
        rules: ControllerSettings,
        rank: int,
        generation: int,
        secret: bytes,
        silence_s: float = 0.0,
    ) -> None:
        nonce = os.urandom(NONCE_BYTES)
        self._wire = FramedConnection(_decisions)
        self._wire.seal(
            derived(secret, KEY, generation),
            mine=nonce,
            theirs=rules.nonce,
            caller=True,
            limit=_FRAME_LIMIT,
        )
        self._aborted = False
        self._silence_s = silence_s
        self._in_vain = 0  # receive timeouts since rank 0's last message
        try:
            self._socket = socket.create_connection((rules.host, rules.port), _HELLO_S)
        except OSError as error:
            raise CollectiveFailed(f"rank 0 can't be reached for negotiation: {error}") from error
        self._socket.settimeout(silence_s or None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._send(nonce + self._wire.frame_of(_encoder.encode(_Hello(rank))))

    def send(self, offer: RequestList) -> None:
        self._send(self._wire.frame_of(_encoder.encode(offer)))

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, within_s: float | None = None) -> list[ResponseList]:
        """Block until a decision or a wake arrives, for at most ``within_s`` seconds; empty on a wake or timeout.

        Raises CollectiveFailed when rank 0 is gone, or on `abort`.
        """
        while True:
            try:
                decisions: list[ResponseList] = [*self._wire.receive(b"")]
            except ProtocolError as error:
                raise self._failure(error) from error
            if decisions:
                return decisions
            listen_s = self._silence_s / _LISTENS or None
            short = within_s is not None and (listen_s is None or within_s < listen_s)
            wait_s = within_s if short else listen_s
            ready = self._poll.poll(None if wait_s is None else 1000 * wait_s)
            if not ready and short:
                return []
            if not ready:
                # Counted, not timed: after all processes were suspended together and resumed, no rank was silent.
                self._in_vain += 1
                if self._in_vain >= _LISTENS:
                    raise self._failure(f"no message for {self._silence_s:g} s")
                continue
            if all(fd == self._woken.fileno() for fd, _ in ready) and not self._aborted:
                self._woken.recv(_READ_BYTES)
                return []
            try:
                part = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise self._failure(error) from error
            if not part:
                raise self._failure("the connection was closed")
            self._wire.feed(part)
            self._in_vain = 0

    def wake(self) -> None:
        """Wake the thread in `receive`. Thread-safe."""
        with contextlib.suppress(OSError):  # full: the thread wakes anyway
            self._waker.send(b"!")

    def _failure(self, error: object) -> CollectiveFailed:
        if self._aborted:
            return CollectiveFailed("aborted", aborted=True)
        return CollectiveFailed(f"rank 0, which negotiates collectives: {error}", rank=0)

    def abort(self) -> None:
        self._aborted = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self.close_sockets()

    def close_sockets(self) -> None:
        for held in (self._socket, self._woken, self._waker):
            held.close()


class ControllerServer:
    """Rank 0's end: receives the other ranks' offers in its own thread and sends decisions in one order.

    ``offered(rank, offer)``, ``left(rank)`` and ``look()`` are called in that thread, and call `publish`; ``died(why)``
    is called if the thread fails. ``own`` is rank 0's mailbox: decisions, wakes, and None at the end.
    """

    def __init__(
        self,
        listener: StoreListener,
        rules: ControllerSettings,
        *,
        size: int,
        generation: int,
        secret: bytes,
        offered: Callable[[int, RequestList], None],
        left: Callable[[int], None],
        look: Callable[[], None],
        died: Callable[[str], None],
    ) -> None:
        self.own: queue.SimpleQueue[ResponseList | str | None] = queue.SimpleQueue()
        self._listener = listener.socket
        self._rules = rules
        self._size = size
        self._secret = derived(secret, KEY, generation)
        self._offered, self._left, self._look, self._died = offered, left, look, died
        self._deaf = False  # temporarily not accepting connections
        self._selector = selectors.DefaultSelector()
        self._wires: dict[socket.socket, FramedConnection] = {}
        self._ranks: dict[socket.socket, int] = {}
        # All ranks connect at about the same time, and are unauthenticated until their first message.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._strangers: PendingHandshakes[socket.socket] = PendingHandshakes(
            _HELLO_S, count_limit(_HELLO_LIMIT, descriptors, extra=size)
        )
        self._sockets: dict[int, socket.socket] = {}
        self._early: dict[int, list[bytes]] = {}  # bodies for ranks that have not connected yet
        self._unsent: dict[int, bytearray] = {}  # frames that ranks have not read yet
        # Guards the three fields above and the sealing of frames, which go out in the order of their numbers. Never
        # blocks.
        self._connecting = threading.Lock()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._closed = threading.Event()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, name=f"elastic-controller-{generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    # ---- sending; the caller ensures that one thread sends at a time ------------------------------------------------

    def publish(self, decision: ResponseList) -> None:
        """Send a decision to all its members, including rank 0. A rank that is gone is skipped."""
        body = _encoder.encode(decision)
        members = decision.members or range(self._size)
        for rank in members:
            if rank != 0:
                self._send(rank, body)
        if 0 in members:
            # Rank 0 last: on receipt its process may exit before the others have been notified.
            self.own.put(decision)

    def _send(self, rank: int, body: bytes) -> None:
        """Send without blocking. Frames that a slow rank does not read are queued and delay no other rank."""
        with self._connecting:
            sock = self._sockets.get(rank)
            if sock is None:
                self._early.setdefault(rank, []).append(body)
                return
            left_over = self._push(rank, sock, body)
        if left_over:
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def _push(self, rank: int, sock: socket.socket, body: bytes) -> bool:
        """Send as much as possible without waiting. Return whether frames remain."""
        wire = self._wires.get(sock)
        if wire is None:
            return False  # the connection is gone
        frame = wire.frame_of(body)
        if (waiting := self._unsent.get(rank)) is not None:
            waiting += frame
            return True
        rest = frame[_sent(sock, frame) :]
        if rest:
            self._unsent[rank] = bytearray(rest)
        return bool(rest)

    def _beat(self) -> None:
        """Send a heartbeat to all ranks that have no frames queued."""
        with self._connecting:
            for rank, sock in self._sockets.items():
                if rank not in self._unsent:
                    self._push(rank, sock, b"")
        self._send_more()

    def _send_more(self) -> None:
        """Send queued frames to ranks that can receive, and watch for the others."""
        with self._connecting:
            for rank, waiting in [*self._unsent.items()]:
                sock = self._sockets.get(rank)
                if sock is None or sock not in self._wires:
                    continue
                del waiting[: _sent(sock, waiting)]
                events = selectors.EVENT_READ
                if len(waiting) > _UNSENT_LIMIT:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # the rank counts as lost
                elif waiting:
                    events |= selectors.EVENT_WRITE
                if not waiting:
                    del self._unsent[rank]
                self._selector.modify(sock, events)

    # ---- receiving -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            look_at = time.monotonic() + LOOK_S
            beat_at = time.monotonic() + BEAT_S
            while not self._closed.is_set():
                self._turn()
                now = time.monotonic()
                if now >= look_at and not self._closed.is_set():
                    look_at = now + LOOK_S
                    self._look_around(now)
                if now >= beat_at and not self._closed.is_set():
                    beat_at = now + BEAT_S
                    self._beat()
        except Exception as error:
            if not self._closed.is_set():
                self._died(f"the negotiation on rank 0 ended: {type(error).__name__}: {error}")
                raise
        finally:
            self._selector.close()
            for sock in (*self._wires, self._listener, self._woken, self._waker):
                sock.close()

    def _turn(self) -> None:
        for key, events in self._selector.select(min(LOOK_S, BEAT_S)):
            if self._closed.is_set():
                return
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(_READ_BYTES)
                self._send_more()
            else:
                if events & selectors.EVENT_WRITE:
                    self._send_more()
                if events & selectors.EVENT_READ and key.fileobj in self._wires:
                    self._read(key.fileobj)

    def _look_around(self, now: float) -> None:
        self._look()
        for sock in self._strangers.late(now):
            self._drop(sock)
        if self._deaf:
            self._deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                if not self._closed.is_set():  # out of descriptors: accept again later
                    self._deaf = True
                    self._selector.unregister(self._listener)
                return
            if (oldest := self._strangers.add(sock, time.monotonic())) is not None:
                self._drop(oldest)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._wires[sock] = AcceptedConnection(
                _hellos, self._secret, mine=self._rules.nonce, limit=_HELLO_LIMIT
            )
            self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: Any) -> None:
        wire = self._wires[sock]
        try:
            part = sock.recv(_READ_BYTES)
        except OSError:
            part = b""
        if not part:
            self._drop(sock)
            return
        wire.feed(part)
        try:
            if sock in self._strangers and (hello := wire.next()) is not None:
                self._greet(sock, hello.rank)
            if sock in self._ranks:
                for offer in wire.receive(b""):
                    self._offered(self._ranks[sock], offer)
        except (ProtocolError, CollectiveFailed, OSError):
            if sock in self._wires:
                self._drop(sock)

    def _greet(self, sock: socket.socket, rank: int) -> None:
        """Assign an authenticated connection to its rank. Raises ProtocolError unless that rank is missing."""
        wire = self._wires[sock]
        with self._connecting:
            if not 0 < rank < self._size or rank in self._sockets:
                raise ProtocolError(f"rank {rank} is not expected")
            wire.expect(_offers, _FRAME_LIMIT)
            self._strangers.remove(sock)
            self._ranks[sock] = rank
            self._sockets[rank] = sock
            for body in self._early.pop(rank, []):
                self._push(rank, sock, body)
        self._send_more()

    def _drop(self, sock: Any) -> None:
        self._selector.unregister(sock)
        self._strangers.remove(sock)
        self._wires.pop(sock, None)
        rank = self._ranks.pop(sock, None)
        sock.close()
        if rank is not None and not self._closed.is_set():
            self._left(rank)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake rank 0's own thread that waits for decisions."""
        self.own.put("wake")

    def abort(self) -> None:
        """Wake the thread that waits for a decision, and the server's thread. Never blocks."""
        self._closed.set()
        self.own.put(None)
        for sock in (self._listener, *list(self._sockets.values())):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)

    def close_sockets(self) -> None:
        for held in (self._listener, self._woken, self._waker, *list(self._wires)):
            held.close()
        self._selector.close()


def _sent(sock: socket.socket, data: bytes | bytearray) -> int:
    """Return how many bytes went out without waiting; all of them if the connection is gone."""
    try:
        return sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)  # reading from it reports the loss
