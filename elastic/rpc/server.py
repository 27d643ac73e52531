"""Server that accepts, authenticates and drops callers in one thread, and exchanges sealed frames with them.

    accepted --first message--> authenticated: each message goes to ``received``
    closed, invalid data, a refused message, unread frames: dropped; ``lost``, once

A caller sends its nonce, followed by sealed frames (`elastic.protocol.framing`). Until its first message is accepted,
the caller is unauthenticated: the size of its messages is limited, and `elastic.protocol.pending_handshakes` limits the
number of such callers and the time that they have. Sending never blocks: frames that a caller does not read are queued,
and do not delay other callers.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from elastic.protocol.framing import AcceptedConnection
from elastic.protocol.messages import ProtocolError
from elastic.protocol.pending_handshakes import PendingHandshakes, count_limit

# maximum number of queued bytes per caller; a caller with more is dropped
UNSENT_LIMIT = 256 << 20
# seconds until the server accepts connections again, after it ran out of file descriptors
DEAF_S = 0.1
FLUSH_S = 1.0  # seconds for which `close` waits without any caller reading
END_S = 5.0  # maximum time in seconds for which `close` waits until queued frames are read
_SHARED_BYTES = 1 << 14  # minimum size in bytes of a body that is queued without being copied
_PARTS = 64  # maximum number of buffers per sendmsg call
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class SealedCaller:
    """Connection of one caller. The server's owner sets ``identity`` when it accepts the first message."""

    socket: socket.socket
    wire: AcceptedConnection
    identity: Any = None


class _Unsent:
    def __init__(self) -> None:
        self.size = 0  # number of queued bytes
        self._parts: deque[bytearray | memoryview] = deque()

    def add(self, *parts: bytes) -> None:
        for part in parts:
            self.size += len(part)
            if len(part) >= _SHARED_BYTES:
                self._parts.append(memoryview(part))
            elif self._parts and isinstance(self._parts[-1], bytearray):
                self._parts[-1] += part
            else:
                self._parts.append(bytearray(part))

    def send(self, sock: socket.socket) -> None:
        """Send queued bytes without blocking.

        On an error, discard all queued bytes: the next read reports that the connection is closed.
        """
        parts = [*itertools.islice(self._parts, _PARTS)]
        try:
            sent = sock.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:
            sent = self.size
        self.size -= sent
        while self._parts and sent >= len(self._parts[0]):
            sent -= len(self._parts.popleft())
        if sent:
            first = self._parts[0]
            if isinstance(first, bytearray):
                del first[:sent]
            else:
                self._parts[0] = first[sent:]


class SealedServer:
    """Listening socket and its callers, served by a thread. `start` starts the thread.

    Args:
        listener: bound socket. The server closes it.
        name: name of the thread.
        decoder: decoder of first messages. A first message may have at most ``first_limit`` bytes, and must arrive
            within ``first_s`` seconds.
        secret: see `elastic.protocol.framing.derived`.
        received: called for each message. It may raise ProtocolError to drop the caller.
        lost: called when an authenticated caller has disconnected, except after the server was closed.
        nonce: this end's nonce, if the callers have received it.
        extra: number of callers that may connect at the same time.
        tick: called with the current time after each iteration of the server's loop, at least every ``idle_s`` seconds.
        died: called with the exception if the thread fails.

    All callbacks run in the server's thread.
    """

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        decoder: msgspec.msgpack.Decoder[Any],
        secret: bytes,
        *,
        received: Callable[[SealedCaller, Any], None],
        lost: Callable[[SealedCaller], None],
        first_limit: int,
        first_s: float,
        nonce: bytes = b"",
        extra: int = 0,
        idle_s: float,
        tick: Callable[[float], None] = lambda now: None,
        died: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._listener = listener
        self._wire: Callable[[], AcceptedConnection] = lambda: AcceptedConnection(
            decoder, secret, mine=nonce, limit=first_limit
        )
        self._received, self._lost, self._tick, self._died = received, lost, tick, died
        self._idle_s = idle_s
        self._deaf = False  # whether the server has stopped accepting connections for a while
        self._closed = threading.Event()
        self._callers: dict[Any, SealedCaller] = {}  # callers, keyed by socket
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.pending: PendingHandshakes[SealedCaller] = PendingHandshakes(
            first_s, count_limit(first_limit, descriptors, extra)
        )
        self._unsent: dict[SealedCaller, _Unsent] = {}
        # Guards the queues, the removal of callers, and the sealing of frames, because frames must be sent in the order
        # of their numbers. Never held while blocking.
        self._sending = threading.Lock()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- sending ---------------------------------------------------------------------------------------------------

    def send(self, caller: SealedCaller, body: bytes) -> None:
        """Send an encoded message without blocking. If the caller has disconnected, discard it. Thread-safe."""
        with self._sending:
            if caller.socket not in self._callers:
                return
            head, tag = caller.wire.around(body)
            waits = caller in self._unsent
            self._unsent.setdefault(caller, _Unsent()).add(head, body, tag)
            if waits or self._send_queued(caller):
                # if the pipe is full, the thread will wake up anyway
                with contextlib.suppress(OSError):
                    self._waker.send(b"!")

    def beat(self) -> None:
        """Send a heartbeat to every authenticated caller without queued frames."""
        for caller in [*self._callers.values()]:
            if caller.identity is not None and caller not in self._unsent:
                self.send(caller, b"")

    def _send_queued(self, caller: SealedCaller) -> int:
        """Send queued frames without blocking.

        Return the number of bytes still queued. This method must be called with ``_sending`` held.
        """
        unsent = self._unsent[caller]
        unsent.send(caller.socket)
        if not unsent.size:
            del self._unsent[caller]
        return unsent.size

    def _send_more(self) -> None:
        with self._sending:
            for caller in [*self._unsent]:
                left = self._send_queued(caller)
                events = selectors.EVENT_READ
                if left > UNSENT_LIMIT:
                    with contextlib.suppress(OSError):
                        # the next read fails and drops the caller
                        caller.socket.shutdown(socket.SHUT_RDWR)
                elif left:
                    events |= selectors.EVENT_WRITE
                self._selector.modify(caller.socket, events)

    def _send_rest(self) -> None:
        ends_at = time.monotonic() + END_S
        with self._sending:  # locked, because another thread may be removing a queue
            waiting = [*self._unsent]
        with selectors.DefaultSelector() as writable:
            for caller in waiting:
                writable.register(caller.socket, selectors.EVENT_WRITE, caller)
            while writable.get_map() and time.monotonic() < ends_at:
                ready = writable.select(FLUSH_S)
                if not ready:
                    return
                for key, _ in ready:
                    with self._sending:
                        left = self._send_queued(key.data)
                    if not left:
                        writable.unregister(key.fileobj)

    # ---- receiving -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                self._turn()
        except Exception as error:
            if not self._closed.is_set():
                self._died(error)
                raise
        finally:
            with contextlib.suppress(OSError):  # raised if the process is out of file descriptors
                self._send_rest()
            self.close_sockets()

    def _turn(self) -> None:
        ready = self._selector.select(DEAF_S if self._deaf else self._idle_s)
        if self._deaf:
            self._deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ)
        writable = False
        for key, events in ready:
            if self._closed.is_set():
                return
            if key.fileobj is self._listener:
                self._accept()
                continue
            if key.fileobj is self._woken:
                self._woken.recv(_READ_BYTES)
            writable |= key.fileobj is self._woken or bool(events & selectors.EVENT_WRITE)
            if events & selectors.EVENT_READ and key.fileobj in self._callers:
                self._read(self._callers[key.fileobj])
        if writable:  # called once per iteration, because one call serves all callers
            self._send_more()
        now = time.monotonic()
        for caller in self.pending.late(now):
            self.drop(caller)
        if not self._closed.is_set():
            self._tick(now)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                if not self._closed.is_set():  # Out of file descriptors: pause accepting.
                    self._deaf = True
                    self._selector.unregister(self._listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = self._callers[sock] = SealedCaller(sock, self._wire())
            self._selector.register(sock, selectors.EVENT_READ)
            if (oldest := self.pending.add(caller, time.monotonic())) is not None:
                self.drop(oldest)

    def _read(self, caller: SealedCaller) -> None:
        try:
            part = caller.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self.drop(caller)
            return
        try:
            for message in caller.wire.receive(part):
                self._received(caller, message)
                self.pending.remove(caller)
                if caller.socket not in self._callers:
                    return
        except (ProtocolError, OSError):
            self.drop(caller)

    def drop(self, caller: SealedCaller) -> None:
        """Close a caller's connection immediately. This method has no effect if it is closed.

        Call this in the server's thread.
        """
        with self._sending:
            if self._callers.pop(caller.socket, None) is None:
                return
            self._unsent.pop(caller, None)
        self.pending.remove(caller)
        self._selector.unregister(caller.socket)
        caller.socket.close()
        if caller.identity is not None and not self._closed.is_set():
            self._lost(caller)

    # ---- abort and close -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Stop the thread and close all connections. Thread-safe, idempotent, never blocks."""
        self._closed.set()
        for sock in (self._listener, *list(self._callers)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self, within_s: float) -> None:
        """Stop serving, after sending queued frames. This method waits at most ``within_s`` seconds for the thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread from select
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(within_s)

    def close_sockets(self) -> None:
        """Close all of the server's descriptors in this process.

        In a forked child, this does not affect the parent's connections.
        """
        for held in (self._listener, self._woken, self._waker, *list(self._callers)):
            held.close()
        self._selector.close()
