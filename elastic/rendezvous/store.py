"""Store through which the ranks of one generation exchange addresses: one exchange per group, one connection each.

Rank 0 serves it on a socket that it bound before it reported ready, on the interface of the data plane only. Every rank
sends (key, rank, size, blob); when all have, each receives all blobs. Frames are sealed (`elastic.protocol.framing`)
and carry the generation, which keeps out strangers and ranks of other generations. torch's TCPStore is unsuitable: it
cannot be aborted while it connects, accepts writes from anyone, and needs 2 round trips per rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from elastic.errors import CollectiveFailed
from elastic.protocol.framing import NONCE_BYTES, AcceptedConnection, FramedConnection, derived
from elastic.protocol.messages import Address, ProtocolError
from elastic.protocol.pending_handshakes import PendingHandshakes, count_limit

log = logging.getLogger("elastic.rendezvous")
_REQUEST_LIMIT = 1 << 18  # bytes; a rank's blob grows by 8 bytes per rank
_REPLY_LIMIT = 1 << 30
_READ_BYTES = 1 << 16
RETRY_S = 0.02  # seconds between attempts to reach a store that is not up yet
_DEAF_S = 0.1  # how long accepting pauses when descriptors run out
# In place of a size, in requests that are not exchanges:
_FETCH = 0  # fetch what rank 0 provides
_ANNOUNCE = -1
_LISTEN = -2  # wait until a rank announces the key
_AWAITED = ""  # key under which the keys of pending exchanges are provided


class _Request(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    key: str
    rank: int
    size: int
    blob: bytes


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    key: str
    blobs: list[bytes]
    error: str = ""  # why the requested value is not available


_requests: msgspec.msgpack.Decoder[_Request] = msgspec.msgpack.Decoder(_Request)
_replies: msgspec.msgpack.Decoder[_Reply] = msgspec.msgpack.Decoder(_Reply)


class StoreListener:
    """A bound socket on which this worker would serve the next generation's store, and the address for its peers."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.socket = sock
        self.address = address

    def close(self) -> None:
        self.socket.close()


def listen(host: str, port: int = 0) -> StoreListener:
    """Bind to this interface only. ``host`` is a numeric address; port 0 means any free port. Raises OSError."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)  # peers may connect before the store is served
    except OSError:
        sock.close()
        raise
    return StoreListener(sock, Address(host, sock.getsockname()[1]))


class Store:
    """One generation's store, as seen by one rank. Thread-safe.

    Rank 0 passes its ``listener``, whose ownership moves to the store. ``timeout_s`` bounds every wait.
    """

    def __init__(
        self,
        address: Address,
        listener: StoreListener | None,
        timeout_s: float,
        *,
        generation: int = 0,
        secret: bytes = b"",
    ) -> None:
        self.address = address
        self.generation = generation
        self._listener = listener
        self._timeout_s = timeout_s
        self._secret = secret
        self._server: _Server | None = None
        self._provided: dict[str, Callable[[], list[bytes]]] = {}
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._calls: set[Call] = set()

    def open(self) -> None:
        """Start serving on rank 0; other ranks connect at their first exchange. Does not wait."""
        if self._listener is not None and self._server is None:
            self._server = _Server(
                self._listener.socket,
                self.generation,
                self._secret,
                self._timeout_s,
                self._provided,
            )
            self._server.start()

    def exchange(
        self,
        key: str,
        rank: int,
        size: int,
        blob: bytes,
        timeout_s: float | None = None,
        call: Call | None = None,
    ) -> list[bytes]:
        """Return every rank's blob, by rank, once all ``size`` ranks have called this with this key.

        ``timeout_s`` limits the wait for the other ranks (default: the store's timeout). ``call`` lets another thread
        abort this exchange. Raises CollectiveFailed when the store's rank is gone, after ``timeout_s``, or on `abort`.
        """
        awaited = f"{f'the {size} ranks of group ' if size > 0 else ''}{key!r} of generation {self.generation}"
        began = time.monotonic()
        deadline = began + (self._timeout_s if timeout_s is None else timeout_s)
        call = call or Call()
        with self._lock:
            self._calls.add(call)
        if self._aborted.is_set():
            call.abort()
        try:
            call.connect(self.address, min(deadline, began + self._timeout_s))
            request = _Request(self.generation, key, rank, size, blob)
            reply = call.ask(request, derived(self._secret, "store", self.generation), deadline)
            if (reply.generation, reply.key) != (self.generation, key):
                raise ProtocolError("the reply belongs to another exchange")
            if reply.error:
                raise ProtocolError(reply.error)
            return reply.blobs
        except (OSError, ProtocolError) as error:
            if call.aborted:
                raise CollectiveFailed(
                    f"aborted while waiting for {awaited}", aborted=True, awaited=key
                ) from None
            raise CollectiveFailed(
                f"timed out waiting for {awaited} at the store {self.address}: {error or type(error).__name__}",
                awaited=key,
            ) from error
        finally:
            with self._lock:
                self._calls.discard(call)
            call.close()

    def awaited(self, timeout_s: float | None = None) -> list[str]:
        """Return the keys of exchanges in which ranks are waiting now. Raises CollectiveFailed."""
        return [key.decode() for key in self.fetch(_AWAITED, 0, timeout_s)]

    def provide(self, key: str, make: Callable[[], list[bytes]]) -> None:
        """On rank 0, answer fetches of this key with what ``make`` returns. ``make`` runs in the store's thread.

        What it raises is logged, and sent to the fetching rank. Call this before `open`, because peers may already have
        connected and are answered immediately.
        """
        assert self._server is None
        self._provided[key] = make

    def fetch(self, key: str, rank: int, timeout_s: float | None = None) -> list[bytes]:
        """Return what rank 0 provides under this key, without waiting for other ranks. Raises CollectiveFailed."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self.exchange(key, rank, _FETCH, b"", limit_s)

    def announce(self, key: str, rank: int, blob: bytes = b"") -> bytes:
        """Release all present and future listeners of this key, who receive ``blob``.

        Returns the blob of the first announcement. Raises CollectiveFailed.
        """
        return self.exchange(key, rank, _ANNOUNCE, blob)[0]

    def listen_to(self, key: str, rank: int, timeout_s: float) -> bytes:
        """Block until a rank has announced this key, and return its blob. Raises CollectiveFailed, also on `abort`."""
        return self.exchange(key, rank, _LISTEN, b"", timeout_s)[0]

    def abort(self) -> None:
        """Make present and future calls of `exchange` here fail. Thread-safe, idempotent, never blocks."""
        self._aborted.set()
        with self._lock:
            for call in self._calls:
                call.abort()

    def close(self) -> None:
        """Stop serving. Ranks that still wait are disconnected, so call this when the generation is over."""
        self.abort()
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()

    def close_in_forked_child(self) -> None:
        """Close the parent's sockets in a forked child."""
        for call in self._calls:
            call.close()
        if self._server is not None:
            self._server.close_in_forked_child()
        elif self._listener is not None:
            self._listener.close()


class Call:
    """A connection to the server for one exchange, which another thread may abort even before it starts."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._aborted = threading.Event()
        self._lock = threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def connect(self, address: Address, deadline: float) -> None:
        """Connect, retrying while refused: without a driver nothing tells when the store's rank has started."""
        while not self._aborted.is_set():
            sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
            with self._lock:
                self._socket = sock
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect((address.host, address.port))
                break
            except ConnectionRefusedError:
                self.close()
                if time.monotonic() > deadline:
                    raise
                self._aborted.wait(RETRY_S)
        if self._aborted.is_set():
            raise OSError("aborted")

    def ask(self, request: _Request, secret: bytes, deadline: float) -> _Reply:
        """Send a request and return its reply. Raises OSError and ProtocolError."""
        assert self._socket is not None
        nonce = os.urandom(NONCE_BYTES)
        wire = FramedConnection(_replies)
        wire.seal(secret, mine=nonce, theirs=b"", caller=True, limit=_REPLY_LIMIT)
        self._socket.sendall(nonce + wire.frame_of(msgspec.msgpack.encode(request)))
        while (reply := wire.next()) is None:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._socket.recv(_READ_BYTES)
            if not part:
                raise OSError("the connection was closed")
            wire.feed(part)
        assert isinstance(reply, _Reply)
        return reply

    def abort(self) -> None:
        """Interrupt a thread inside a system call. Thread-safe, idempotent, never blocks."""
        self._aborted.set()
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


@dataclass
class _Peer:
    """A connection to the server that has not been answered yet."""

    wire: FramedConnection
    request: _Request | None = None


class _Server:
    """Thread on rank 0 that collects requests by key and answers when a key is complete."""

    def __init__(
        self,
        listener: socket.socket,
        generation: int,
        secret: bytes,
        timeout_s: float,
        provided: dict[str, Callable[[], list[bytes]]],
    ) -> None:
        self._listener = listener
        self._generation = generation
        self._secret = derived(secret, "store", generation)
        self._timeout_s = timeout_s
        self._closed = False
        self._deaf = False  # temporarily not accepting connections
        self.provided: dict[str, Callable[[], list[bytes]]] = {
            _AWAITED: lambda: [key.encode() for key, _ in self._groups]
        } | provided
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, _Peer] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._strangers: PendingHandshakes[socket.socket] = PendingHandshakes(
            timeout_s, count_limit(_REQUEST_LIMIT, descriptors)
        )
        self._groups: dict[tuple[str, int], dict[int, socket.socket]] = {}
        self._announced: dict[str, bytes] = {}
        self._listening: dict[str, set[socket.socket]] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, name=f"elastic-store-{generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def close_in_forked_child(self) -> None:
        for held in (self._listener, *self._peers):
            held.close()

    def _serve(self) -> None:
        while not self._closed:
            self._turn()
        for held in list(self._peers):
            self._drop(held)
        self._selector.close()
        self._listener.close()

    def _turn(self) -> None:
        ready = self._selector.select(_DEAF_S if self._deaf else self._timeout_s)
        if self._deaf:
            self._deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._peers:  # not dropped earlier in this turn
                self._read(key.fileobj)
        self._drop_silent(time.monotonic())

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                if not self._closed:  # out of descriptors: accept again later
                    self._deaf = True
                    self._selector.unregister(self._listener)
                return
            if (oldest := self._strangers.add(sock, time.monotonic())) is not None:
                self._drop(oldest)
            sock.setblocking(False)
            self._peers[sock] = _Peer(
                AcceptedConnection(_requests, self._secret, limit=_REQUEST_LIMIT)
            )
            self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: Any) -> None:
        peer = self._peers[sock]
        try:
            part = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part or peer.request is not None:  # closed, or sent an unexpected message
            self._drop(sock)
            return
        peer.wire.feed(part)
        try:
            request = peer.wire.next()
        except ProtocolError:
            self._drop(sock)
            return
        if request is None:
            return
        if self._belongs_here(request):
            peer.request = request
            self._strangers.remove(sock)
            self._collect(sock, request)
        else:
            self._drop(sock)

    def _belongs_here(self, request: _Request) -> bool:
        fetches = request.size == _FETCH and request.key in self.provided
        announces = request.size in (_ANNOUNCE, _LISTEN)
        here = request.rank >= 0 and (fetches or announces or request.rank < request.size)
        return here and request.generation == self._generation

    def _collect(self, sock: socket.socket, request: _Request) -> None:
        if request.size == _FETCH:
            self._provide(sock, request)
            return
        if request.size in (_ANNOUNCE, _LISTEN):
            self._tell(sock, request)
            return
        group = self._groups.setdefault((request.key, request.size), {})
        before = group.get(request.rank)
        if before is not None:  # its rank gave up and reconnected
            self._drop(before)
            group = self._groups.setdefault((request.key, request.size), {})
        group[request.rank] = sock
        if len(group) < request.size:
            return
        del self._groups[request.key, request.size]
        requests = {rank: self._peers[each].request for rank, each in group.items()}
        blobs = [asked.blob for _, asked in sorted(requests.items()) if asked is not None]
        for rank, each in group.items():
            asked = requests[rank]
            assert asked is not None
            self._answer(each, asked, blobs)

    def _provide(self, sock: socket.socket, request: _Request) -> None:
        blobs, failed = [], ""
        try:
            blobs = self.provided[request.key]()
        except Exception as error:  # this thread serves all other ranks too
            log.exception("the store does not support %r", request.key)
            failed = f"{request.key!r} is not available: {type(error).__name__}: {error}"
        self._answer(sock, request, blobs, failed)

    def _tell(self, sock: socket.socket, request: _Request) -> None:
        listening = self._listening.setdefault(request.key, set())
        listening.add(sock)
        if request.size == _ANNOUNCE:
            self._announced.setdefault(request.key, request.blob)
        if request.key in self._announced:
            for each in list(listening):
                self._answer(each, request, [self._announced[request.key]])

    def _answer(
        self, sock: socket.socket, request: _Request, blobs: list[bytes], error: str = ""
    ) -> None:
        reply = _Reply(self._generation, request.key, blobs, error)
        frame = self._peers[sock].wire.frame_of(msgspec.msgpack.encode(reply))
        with contextlib.suppress(OSError):
            sock.settimeout(1.0)  # a stopped peer with a full buffer must not delay the others
            sock.sendall(frame)
        self._drop(sock)

    def _drop_silent(self, now: float) -> None:
        for sock in self._strangers.late(now):
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._strangers.remove(sock)
        peer = self._peers.pop(sock, None)
        if peer is None:
            return
        if peer.request is not None:
            self._listening.get(peer.request.key, set()).discard(sock)
            key = (peer.request.key, peer.request.size)
            group = self._groups.get(key, {})
            if group.get(peer.request.rank) is sock:
                del group[peer.request.rank]
            if not group:
                self._groups.pop(key, None)
        self._selector.unregister(sock)
        sock.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
