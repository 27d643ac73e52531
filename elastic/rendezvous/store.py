"""Rendezvous store through which the ranks of a generation exchange addresses.

Exchanges of one rank can run at the same time, each on its own connection. With ``keeps``, a connection is kept for a
later exchange, which then takes one round trip instead of two.

Rank 0 serves the store on a socket that it bound before it sent Ready, only on the interface of the data plane. In an
exchange, every rank sends (key, rank, size, blob), and receives all blobs once all ranks have sent theirs. Frames are
sealed (`elastic.protocol.framing`) and carry the generation, which excludes unauthenticated peers and ranks of other
generations. torch's TCPStore is unsuitable: it cannot be aborted while it connects, accepts writes from any client, and
needs 2 round trips per rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from elastic.errors import CollectiveFailed
from elastic.protocol.framing import NONCE_BYTES, FramedConnection, derived
from elastic.protocol.messages import Address, ProtocolError
from elastic.rpc.server import SealedCaller, SealedServer

log = logging.getLogger("elastic.rendezvous")
# maximum size of a request in bytes; a rank's blob grows by 8 bytes per rank
_REQUEST_LIMIT = 1 << 18
_REPLY_LIMIT = 1 << 30
_READ_BYTES = 1 << 16
# Seconds after which an idle connection is not used any more, because a firewall may have dropped it. Recoveries are
# shorter.
KEPT_S = 5.0
CLOSE_S = 5.0  # timeout in seconds for the server thread to end
RETRY_S = 0.02  # interval in seconds between attempts to connect to a store that is not served yet
# Special values of the size field, for requests other than exchanges:
_FETCH = 0  # fetch the value that rank 0 provides under the key
_ANNOUNCE = -1
_LISTEN = -2  # wait until a rank announces the key
_AWAITED = ""  # key under which the store provides the keys of pending exchanges


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
    error: str = ""  # reason why the value is not available


_requests: msgspec.msgpack.Decoder[_Request] = msgspec.msgpack.Decoder(_Request)
_replies: msgspec.msgpack.Decoder[_Reply] = msgspec.msgpack.Decoder(_Reply)


class StoreListener:
    """Bound socket on which this worker can serve the next generation's store, with its address for the other ranks."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.socket = sock
        self.address = address

    def close(self) -> None:
        self.socket.close()


def listen(host: str, port: int = 0) -> StoreListener:
    """Bind and listen on one interface.

    Args:
        host: numeric address of the interface.
        port: port number. 0 lets the system choose one.

    Raises:
        OSError: the address cannot be bound.
    """
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)  # Listen already, so that peers can connect before the store is served.
    except OSError:
        sock.close()
        raise
    return StoreListener(sock, Address(host, sock.getsockname()[1]))


def connect_ahead(address: Address, count: int) -> list[socket.socket]:
    """Start to connect to a store that is not served yet, but whose rank already listens. Does not wait.

    Returns:
        At most ``count`` sockets, for the argument ``connecting`` of `Store`.
    """
    found: list[socket.socket] = []
    for _ in range(count):
        sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex((address.host, address.port)) in (0, errno.EINPROGRESS):
            found.append(sock)
        else:
            sock.close()
    return found


class Store:
    """Rendezvous store of one generation, as seen from one rank. Thread-safe.

    Args:
        address: address at which rank 0 serves the store.
        listener: on rank 0, its listener, of which the store takes ownership. None on other ranks.
        timeout_s: default timeout of every wait, in seconds.
        generation: generation of the world.
        secret: secret of the job.
        keeps: maximum number of idle connections that this rank keeps for later exchanges, and that rank 0 holds open.
        connecting: sockets that `connect_ahead` has started to connect to ``address``. The store takes ownership.
        owner: rank that serves the store. The documentation of this class calls it rank 0.
    """

    def __init__(
        self,
        address: Address,
        listener: StoreListener | None,
        timeout_s: float,
        *,
        generation: int = 0,
        secret: bytes = b"",
        keeps: int = 0,
        connecting: Iterable[socket.socket] = (),
        owner: int = 0,
    ) -> None:
        self.address = address
        self._owner = owner
        self.generation = generation
        self._keeps = keeps
        self._listener = listener
        self._timeout_s = timeout_s
        self._key = derived(secret, "store", generation)
        self._kept = [_Connection(sock, self._key, connected=False) for sock in connecting]
        self._secret = secret
        self._server: _Server | None = None
        self._provided: dict[str, Callable[[], list[bytes]]] = {}
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._calls: set[Call] = set()

    def open(self) -> None:
        """Start to serve, on rank 0. On other ranks, do nothing: they connect at their first exchange.

        This method does not wait.
        """
        if self._listener is not None and self._server is None:
            self._server = _Server(
                self._listener.socket,
                self.generation,
                self._secret,
                self._timeout_s,
                self._provided,
            )
            self._server.rpc.start()

    def exchange(
        self,
        key: str,
        rank: int,
        size: int,
        blob: bytes,
        timeout_s: float | None = None,
        call: Call | None = None,
    ) -> list[bytes]:
        """Wait until all ``size`` ranks have called this method with the same key, and return the blobs of all ranks.

        Args:
            key: name of the exchange.
            rank: rank of this process in the exchange.
            size: number of ranks that take part.
            blob: bytes that this rank contributes.
            timeout_s: timeout in seconds for the other ranks (default: the store's timeout).
            call: connection to use, through which another thread can abort this exchange.

        Raises:
            CollectiveFailed: the rank that serves the store was lost, the timeout has expired, or `abort` was called.
        """
        what = f"exchange of the {size} ranks of group" if size > 0 else "request for"
        awaited = f"the {what} {key!r} in generation {self.generation}"
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        reach_s = min(limit_s, self._timeout_s)
        deadline = (began := time.monotonic()) + limit_s
        step, step_s = "connecting to", reach_s
        call = call or Call()
        with self._lock:
            self._calls.add(call)
        if self._aborted.is_set():
            call.abort()
        try:
            call.connect(self._take_kept(), self.address, self._key, began + reach_s)
            step, step_s = "waiting at", limit_s
            request = _Request(self.generation, key, rank, size, blob)
            reply = call.ask(request, deadline)
            if (reply.generation, reply.key) != (self.generation, key):
                raise ProtocolError(
                    "the store's reply belongs to another request: install the same hvd-elastic on"
                    " every host"
                )
            if reply.error:
                raise ProtocolError(reply.error)
            if self._keeps:
                self._keep(call.release())
            return reply.blobs
        except (OSError, ProtocolError) as error:
            if call.aborted:
                raise CollectiveFailed(
                    f"{awaited} was aborted, because the world ended: wait for the next world",
                    aborted=True,
                    awaited=key,
                ) from None
            late = isinstance(error, TimeoutError)
            why = (
                f"timed out after {round(step_s, 1):g} s" if late else error or type(error).__name__
            )
            raise CollectiveFailed(
                f"{awaited} failed while {step} the store {self.address} of rank {self._owner}: {why}. Check that every"
                " rank runs and that its host can reach this address, or pass a longer --gloo-timeout-seconds",
                awaited=key,
            ) from error
        finally:
            with self._lock:
                self._calls.discard(call)
            call.close()

    def _take_kept(self) -> _Connection | None:
        """Return the connection that was used last, or None if no connection was used recently or is still open."""
        now = time.monotonic()
        with self._lock:
            # The server drops a connection without a request after its own timeout.
            late_s = min(KEPT_S, self._timeout_s / 2)
            late = [each for each in self._kept if now - each.used_at > late_s or each.ended()]
            self._kept = [each for each in self._kept if each not in late]
            taken = self._kept.pop() if self._kept else None
        for each in late:
            each.close()
        return taken

    def _keep(self, connection: _Connection | None) -> None:
        if connection is None:
            return
        connection.used_at = time.monotonic()
        with self._lock:
            keeps = not self._aborted.is_set() and len(self._kept) < self._keeps
            if keeps:
                self._kept.append(connection)
        if not keeps:
            connection.close()

    def awaited(self, timeout_s: float | None = None) -> list[str]:
        """Return the keys of the exchanges in which ranks are currently waiting.

        Raises CollectiveFailed if the store does not respond.
        """
        return [key.decode() for key in self.fetch(_AWAITED, 0, timeout_s)]

    def provide(self, key: str, make: Callable[[], list[bytes]]) -> None:
        """Register ``make``, on rank 0, as the function that answers fetches of a key. It runs in the store's thread.

        An exception of ``make`` is logged, and its text is sent to the fetching rank. Call this before `open`: other
        ranks may already have connected, and `open` answers them immediately.
        """
        assert self._server is None
        self._provided[key] = make

    def fetch(self, key: str, rank: int, timeout_s: float | None = None) -> list[bytes]:
        """Fetch the value that rank 0 provides under a key. This method does not wait for the other ranks.

        Raises:
            CollectiveFailed: rank 0 did not respond within ``timeout_s`` seconds.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self.exchange(key, rank, _FETCH, b"", limit_s)

    def announce(self, key: str, rank: int, blob: bytes = b"") -> bytes:
        """Announce ``blob`` under a key. All current and future callers of `listen_to` with this key receive it.

        Returns the blob of the key's first announcement, which may be another rank's. Raises CollectiveFailed if the
        store does not respond.
        """
        return self.exchange(key, rank, _ANNOUNCE, blob)[0]

    def listen_to(self, key: str, rank: int, timeout_s: float) -> bytes:
        """Block until a rank has announced the key, and return the announced blob.

        Raises:
            CollectiveFailed: no rank announced the key within ``timeout_s`` seconds, or `abort` was called.
        """
        return self.exchange(key, rank, _LISTEN, b"", timeout_s)[0]

    def abort(self) -> None:
        """Make current and future calls of `exchange` on this rank fail. Thread-safe, idempotent, never blocks."""
        self._aborted.set()
        with self._lock:
            for call in self._calls:
                call.abort()
            kept, self._kept = self._kept, []
        for each in kept:
            each.close()

    def close(self) -> None:
        """Stop serving. Ranks that are still waiting are disconnected, so call this after the generation has ended."""
        self.abort()
        if self._server is not None:
            self._server.rpc.close(CLOSE_S)
        elif self._listener is not None:
            self._listener.close()

    def close_in_forked_child(self) -> None:
        """Close the sockets that a forked child has inherited. This method is called in the child."""
        for call in self._calls:
            call.close()
        for connection in self._kept:
            connection.close()
        if self._server is not None:
            self._server.rpc.close_sockets()
        elif self._listener is not None:
            self._listener.close()


class _Connection:
    """Connection of a rank to the store's server. It carries one request at a time."""

    def __init__(self, sock: socket.socket, key: bytes, *, connected: bool = True) -> None:
        self.socket = sock
        self.used_at = time.monotonic()  # time of the last reply, or of the start
        self._connected = connected
        self._opening = os.urandom(NONCE_BYTES)  # sent before the first request
        self._wire = FramedConnection(_replies)
        self._wire.seal(key, mine=self._opening, theirs=b"", caller=True, limit=_REPLY_LIMIT)

    def established(self, deadline: float) -> bool:
        """Wait until the socket is connected. Return False if it cannot connect, or the deadline has passed."""
        if not self._connected:
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            ready = poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))
            failed = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._connected = bool(ready) and not failed
            if self._connected:
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connected

    def ended(self) -> bool:
        """Return whether the server has closed the connection. Only called between requests."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return self._connected and bool(poll.poll(0))

    def ask(self, request: _Request, deadline: float) -> _Reply:
        opening, self._opening = self._opening, b""
        self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
        self.socket.sendall(opening + self._wire.frame_of(msgspec.msgpack.encode(request)))
        while (reply := self._wire.next()) is None:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self.socket.recv(_READ_BYTES)
            if not part:
                raise OSError("the store closed the connection: see the output of rank 0")
            self._wire.feed(part)
        assert isinstance(reply, _Reply)
        return reply

    def close(self) -> None:
        self.socket.close()


class Call:
    """Request to the store's server, on a new connection or one that was kept.

    Another thread may abort it at any time, even before it connects.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._connection: _Connection | None = None
        self._aborted = threading.Event()
        self._lock = threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def connect(
        self, kept: _Connection | None, address: Address, key: bytes, deadline: float
    ) -> None:
        """Use a kept connection, or connect. While it is refused, retry, because rank 0 may not have started yet.

        Args:
            kept: connection of an earlier request, or None.
            address: address of the server.
            key: key that seals the frames of a new connection.
            deadline: time at which the attempt to connect ends, on the monotonic clock in seconds.

        Raises:
            OSError: the server cannot be reached, or `abort` was called.
        """
        if kept is not None:
            self._use(kept.socket)
            if kept.established(deadline):
                self._connection = kept
            else:
                kept.close()
        while self._connection is None and not self._aborted.is_set():
            sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
            self._use(sock)
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect((address.host, address.port))
                self._connection = _Connection(sock, key)
            except ConnectionRefusedError:
                self.close()
                if time.monotonic() > deadline:
                    raise
                self._aborted.wait(RETRY_S)
        if self._aborted.is_set():
            raise OSError("aborted")

    def _use(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = sock
            if self._aborted.is_set():
                # `abort` has not shut this socket down, and connecting may take long
                raise OSError("aborted")

    def ask(self, request: _Request, deadline: float) -> _Reply:
        """Send a request and return the reply to it.

        Raises:
            OSError: the connection failed, or the deadline has passed (TimeoutError).
            ProtocolError: the server sent an invalid message.
        """
        assert self._connection is not None
        return self._connection.ask(request, deadline)

    def release(self) -> _Connection | None:
        """Return the connection, which the caller then owns, or None if `abort` was called."""
        with self._lock:
            if self._aborted.is_set():
                return None
            connection, self._connection, self._socket = self._connection, None, None
            return connection

    def abort(self) -> None:
        """Abort the request and wake the thread that waits for it. Thread-safe, idempotent, never blocks."""
        with self._lock, contextlib.suppress(OSError):
            self._aborted.set()
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = self._connection = None


class _Server:
    def __init__(
        self,
        listener: socket.socket,
        generation: int,
        secret: bytes,
        timeout_s: float,
        provided: dict[str, Callable[[], list[bytes]]],
    ) -> None:
        self._generation = generation
        self.provided: dict[str, Callable[[], list[bytes]]] = {
            _AWAITED: lambda: [key.encode() for key, _ in self._groups]
        } | provided
        self._groups: dict[tuple[str, int], dict[int, SealedCaller]] = {}
        self._asking: set[SealedCaller] = set()  # callers whose request has not been answered
        self._announced: dict[str, bytes] = {}
        self._listening: dict[str, set[SealedCaller]] = {}
        self.rpc = SealedServer(
            listener,
            f"elastic-store-{generation}",
            _requests,
            derived(secret, "store", generation),
            received=self._received,
            lost=self._lost,
            first_limit=_REQUEST_LIMIT,
            first_s=timeout_s,
            idle_s=timeout_s,
        )

    def _received(self, caller: SealedCaller, request: _Request) -> None:
        if caller in self._asking or not self._belongs_here(request):
            raise ProtocolError(
                "the store received an unexpected request: install the same hvd-elastic on every host"
            )
        caller.identity = request
        self._asking.add(caller)
        self._collect(caller, request)

    def _belongs_here(self, request: _Request) -> bool:
        fetches = request.size == _FETCH and request.key in self.provided
        announces = request.size in (_ANNOUNCE, _LISTEN)
        here = request.rank >= 0 and (fetches or announces or request.rank < request.size)
        return here and request.generation == self._generation

    def _collect(self, caller: SealedCaller, request: _Request) -> None:
        if request.size == _FETCH:
            self._provide(caller, request)
            return
        if request.size in (_ANNOUNCE, _LISTEN):
            self._subscribe(caller, request)
            return
        group = self._groups.setdefault((request.key, request.size), {})
        before = group.get(request.rank)
        if before is not None:  # The rank had timed out and has connected again.
            self.rpc.drop(before)
            group = self._groups.setdefault((request.key, request.size), {})
        group[request.rank] = caller
        if len(group) < request.size:
            return
        del self._groups[request.key, request.size]
        blobs = [each.identity.blob for _, each in sorted(group.items())]
        self._answer(group.values(), request, blobs)

    def _provide(self, caller: SealedCaller, request: _Request) -> None:
        blobs, failed = [], ""
        try:
            blobs = self.provided[request.key]()
        except (
            Exception
        ) as error:  # An exception must not end this thread, which serves all other ranks as well.
            log.exception("the store failed to serve the request %r", request.key)
            failed = f"{request.key!r} is not available: {type(error).__name__}: {error}"
        self._answer([caller], request, blobs, failed)

    def _subscribe(self, caller: SealedCaller, request: _Request) -> None:
        listening = self._listening.setdefault(request.key, set())
        listening.add(caller)
        if request.size == _ANNOUNCE:
            self._announced.setdefault(request.key, request.blob)
        if request.key in self._announced:
            announced = [self._announced[request.key]]
            self._answer(self._listening.pop(request.key), request, announced)

    def _answer(
        self,
        callers: Iterable[SealedCaller],
        request: _Request,
        blobs: list[bytes],
        error: str = "",
    ) -> None:
        reply = _Reply(self._generation, request.key, blobs, error)
        # encoded once for all callers, because it is large with many ranks
        body = msgspec.msgpack.encode(reply)
        for caller in callers:
            self._asking.discard(caller)
            self.rpc.send(caller, body)

    def _lost(self, caller: SealedCaller) -> None:
        request: _Request = caller.identity
        self._asking.discard(caller)
        self._listening.get(request.key, set()).discard(caller)
        key = (request.key, request.size)
        group = self._groups.get(key, {})
        if group.get(request.rank) is caller:
            del group[request.rank]
        if not group:
            self._groups.pop(key, None)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
