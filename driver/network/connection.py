"""One connection to a control server, from accept to close: converts bytes to messages. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import ssl
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from elastic.driver.network.keepalive import expect_signs_of_life
from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.messages import HANDSHAKE_LIMIT, Address, Challenge, ProtocolError, encoded
from elastic.protocol.tls import FLAGS, TlsEndpoint

HANDSHAKE_S = 5.0
TLS_HANDSHAKE_LIMIT = 64 * 1024  # bytes, including the caller's certificates
BACKLOG_LIMIT = 64 * 1024 * 1024  # bytes; a worker that does not read is disconnected
DRAIN_LIMIT = 16 * 1024 * 1024  # bytes

_TLS_HELLO = b"\x16\x03"  # first bytes of a TLS connection

# Errors of a connection that was not closed by its peer. The kernel reports an unreachable host if routers do.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}

Who = TypeVar("Who", bound=Hashable)


class Owner(Protocol[Who]):
    """Interface of the server that a connection belongs to: see `elastic.driver.network.control_server`."""

    secret: bytes
    lease_s: float

    @property
    def tls(self) -> ssl.SSLContext | None: ...

    @property
    def decoder(self) -> msgspec.msgpack.Decoder[Any]:
        """Decoder of the callers' messages."""
        ...

    def opened(self, connection: Connection[Who]) -> None: ...

    def authenticate(self, connection: Connection[Who], nonce: bytes, answer: Any) -> Who:
        """Return the caller that answered the challenge. Raises ProtocolError with the reason to refuse."""
        ...

    def hear(self, peer: Who, message: Any) -> None: ...

    def lost(
        self, connection: Connection[Who], peer: Who | None, trouble: str, silent: bool
    ) -> None: ...


class Connection(asyncio.Protocol, Generic[Who]):
    """One connection, from accept to close."""

    def __init__(self, server: Owner[Who], loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._wire = FramedConnection(server.decoder)
        self._unproved = 0  # bytes received before authentication
        self._tls = None if server.tls is None else TlsEndpoint(server.tls, server=True)
        self._identity: Who | None = None
        self._over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self.peer = "?"

    def over(self) -> bool:
        return self._over

    @property
    def backlog(self) -> int:
        """Number of bytes that wait to be sent."""
        return 0 if self._over else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        expect_signs_of_life(self._socket, self._server.lease_s)
        name = transport.get_extra_info("peername")
        self.peer = str(Address(*name[:2])) if name else "?"
        self._server.opened(self)
        self._deadline = self._loop.call_later(HANDSHAKE_S, self._too_late)
        self.write(encoded(Challenge(self._nonce)))

    def data_received(self, data: bytes) -> None:
        if self.over():
            return
        try:
            if self._identity is None:
                self._count(data)
            if self._tls is not None:
                data = self._tls.feed(data)
                self._flush()
            if self._identity is None:
                self._wire.feed(data)
                answer = self._wire.next()
                if answer is None:
                    return
                if self._wire.unread:
                    raise ProtocolError("it sent more data before it was accepted")
                self._identity = self._server.authenticate(self, self._nonce, answer)
                assert self._deadline is not None
                self._deadline.cancel()
            else:
                for message in self._wire.receive(data):
                    self._server.hear(self._identity, message)
                    if self.over():
                        return
        except ProtocolError as error:
            self._flush()  # TLS may have an alert with the reason
            self._end(str(error))

    def _count(self, data: bytes) -> None:
        """Limit the data of an unauthenticated caller. Raises ProtocolError."""
        if not self._unproved and self._tls is None and data[:2] == _TLS_HELLO:
            raise ProtocolError(f"it uses TLS, but this job was started without {FLAGS}")
        self._unproved += len(data)
        limit = HANDSHAKE_LIMIT if self._tls is None else TLS_HANDSHAKE_LIMIT
        if self._unproved > limit:
            raise ProtocolError(f"more than {limit} bytes before authentication")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("", silent=_is_silence(exc))

    def accept(self, body: bytes, nonce: bytes) -> None:
        """Accept the caller: sends the last frame without a seal."""
        self.write(body)
        self._wire.seal(self._server.secret, mine=self._nonce, theirs=nonce, caller=False)

    def write(self, *bodies: bytes) -> bool:
        """Send or buffer encoded messages. Returns False if the connection is over."""
        if self._over or self._transport.is_closing():
            return False
        data = b"".join(map(self._wire.frame_of, bodies))
        if self._tls is None:
            self._transport.write(data)
        else:
            self._tls.say(data)
            self._flush()
        if self._transport.get_write_buffer_size() > BACKLOG_LIMIT:
            self._end(f"it has not read {BACKLOG_LIMIT >> 20} MiB that were sent")
            return False
        return True

    def _flush(self) -> None:
        """Send pending TLS data."""
        if self._tls is not None and (data := self._tls.due()):
            self._transport.write(data)

    def drain(self) -> None:
        """Read available data without waiting, up to the end of the stream."""
        read = 0
        while not self._over and read < DRAIN_LIMIT:
            try:
                data = os.read(self._socket.fileno(), 256 * 1024)
            except BlockingIOError:
                return
            except OSError as error:
                self._end("", silent=_is_silence(error))
                return
            if not data:
                self._end("")
                return
            read += len(data)
            self.data_received(data)

    def abort(self) -> None:
        self._end("")

    def abandon(self) -> None:
        """Abort the connection without notifying the server, since another one has replaced it."""
        self._over = True
        with contextlib.suppress(OSError):
            self._transport.abort()

    def give_way(self) -> None:
        self._end("too many other connections were opened before it was authenticated")

    def _too_late(self) -> None:
        hint = f"; if it belongs to this job, pass it {FLAGS}"
        silent = self._tls is not None and not self._unproved
        self._end(f"not authenticated within {HANDSHAKE_S:.0f} s{hint if silent else ''}")

    def _end(self, trouble: str, *, silent: bool = False) -> None:
        """Close immediately. The server is notified once, before this returns."""
        if self._over:
            return
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        with contextlib.suppress(OSError):
            self._transport.abort()
        self._server.lost(self, self._identity, trouble, silent)


def _is_silence(error: Exception | None) -> bool:
    return isinstance(error, OSError) and error.errno in _SILENT
