"""Endpoint of a control connection in an event loop, with TLS, frames, keepalives and a send buffer.

Makes no decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import ssl
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.messages import HANDSHAKE_LIMIT, Address, ProtocolError
from elastic.protocol.tls import FLAGS, TlsEndpoint

HANDSHAKE_S = 5.0
# maximum number of bytes of a TLS handshake, including the caller's certificates
TLS_HANDSHAKE_LIMIT = 64 * 1024
# maximum number of unsent bytes; if a peer exceeds it because it does not read, it is disconnected
BACKLOG_LIMIT = 64 * 1024 * 1024
KEEPALIVE_S = 1  # seconds between keepalives; the minimum that the kernel allows
DRAIN_LIMIT = 16 * 1024 * 1024  # maximum number of bytes that `Connection.drain` reads

_TLS_HELLO = b"\x16\x03"  # first bytes of a TLS handshake

# Errors that indicate an unresponsive peer or host. "Unreachable" errors come from a router or from the local kernel.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}

PeerId = TypeVar("PeerId", bound=Hashable)


class Owner(Protocol[PeerId]):
    """Interface of the object that owns connections: a `ControlServer`, or an agent's `Uplink`."""

    lease_s: float

    tls: ssl.SSLContext | None
    decoder: msgspec.msgpack.Decoder[Any]  # decoder of the peers' messages

    def opened(self, connection: Connection[PeerId]) -> None: ...

    def authenticate(self, connection: Connection[PeerId], message: Any) -> PeerId | None:
        """Check a handshake message from the peer.

        Returns:
            The identity of the peer, or None if the handshake needs another message.

        Raises:
            ProtocolError: the peer is refused. The text of the error is the reason.
        """
        ...

    def receive(self, peer: PeerId, message: Any) -> None: ...

    def lost(
        self,
        connection: Connection[PeerId],
        peer: PeerId | None,
        trouble: str,
        error: Exception | None,
    ) -> None:
        """Handle the end of a connection. Called once for each connection, unless it was abandoned.

        Args:
            connection: the connection.
            peer: identity of the peer, or None if the peer was not authenticated.
            trouble: reason why this end closed the connection, or empty if it did not.
            error: error that the transport reported, or None.
        """
        ...


class Connection(asyncio.Protocol, Generic[PeerId]):
    """Control connection, from accept or connect to close.

    Args:
        calls: whether this end opened the connection.
    """

    def __init__(
        self, owner: Owner[PeerId], loop: asyncio.AbstractEventLoop, *, calls: bool = False
    ) -> None:
        self._owner = owner
        self._loop = loop
        self._calls = calls
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.wire = FramedConnection(owner.decoder)
        self.patience = 0  # number of unsent bytes allowed in addition to BACKLOG_LIMIT
        self._unproved = 0  # number of bytes received before authentication
        self._tls = None if owner.tls is None else TlsEndpoint(owner.tls, server=not calls)
        self._identity: PeerId | None = None
        self._over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self.peer = "?"

    def over(self) -> bool:
        return self._over

    @property
    def local(self) -> str:
        """Numeric address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def backlog(self) -> int:
        """Number of bytes waiting to be sent."""
        return 0 if self._over else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport, so the type is cast instead of checked.
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _expect_signs_of_life(self._socket, self._owner.lease_s)
        name = transport.get_extra_info("peername")
        self.peer = str(Address(*name[:2])) if name else "?"
        if not self._calls:
            self._deadline = self._loop.call_later(HANDSHAKE_S, self._too_late)
        self._flush()
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.over():
            return
        try:
            if self._identity is None and not self._calls:
                self._count(data)
            if self._tls is not None:
                data = self._tls.feed(data)
                self._flush()
            for message in self.wire.receive(data):
                if self._identity is None:
                    self._authenticate(message)
                else:
                    self._owner.receive(self._identity, message)
                if self.over():
                    return
        except ProtocolError as error:
            self._flush()  # Send a pending TLS alert, which may contain the reason.
            self.end(str(error))

    def _authenticate(self, message: Any) -> None:
        if not self._calls and self.wire.unread:
            raise ProtocolError(
                "the peer sent data before authentication completed: check that it is an agent or"
                " worker of this job"
            )
        self._identity = self._owner.authenticate(self, message)
        if self._identity is not None and self._deadline is not None:
            self._deadline.cancel()

    def _count(self, data: bytes) -> None:
        """Count the bytes received from an unauthenticated peer.

        Raises:
            ProtocolError: the peer sent more than the limit, or uses TLS although this job does not.
        """
        if not self._unproved and self._tls is None and data[:2] == _TLS_HELLO:
            raise ProtocolError(
                f"the peer uses TLS, but this job was started without {FLAGS}: pass these flags to the job"
            )
        self._unproved += len(data)
        limit = HANDSHAKE_LIMIT if self._tls is None else TLS_HANDSHAKE_LIMIT
        if self._unproved > limit:
            raise ProtocolError(
                f"the peer sent more than {limit} bytes before authentication: check that it belongs"
                " to this job"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(error=exc)

    def write(self, *bodies: bytes) -> bool:
        """Send or buffer encoded messages. Return False if the connection has ended."""
        if self._over or self._transport.is_closing():
            return False
        data = b"".join(map(self.wire.frame_of, bodies))
        if self._tls is None:
            self._transport.write(data)
        else:
            self._tls.send(data)
            self._flush()
        if self._transport.get_write_buffer_size() > BACKLOG_LIMIT + self.patience:
            self.end(f"it has not read {BACKLOG_LIMIT >> 20} MiB that were sent")
            return False
        return True

    def _flush(self) -> None:
        if self._tls is not None and (data := self._tls.due()):
            self._transport.write(data)

    def drain(self) -> None:
        """Process the data that has already arrived, up to about DRAIN_LIMIT bytes, without waiting for more."""
        read = 0
        while not self._over and read < DRAIN_LIMIT:
            try:
                data = os.read(self._socket.fileno(), 256 * 1024)
            except BlockingIOError:
                return
            except OSError as error:
                self.end(error=error)
                return
            if not data:
                self.end()
                return
            read += len(data)
            self.data_received(data)

    def abandon(self) -> None:
        """Close the connection immediately without notifying the owner."""
        self._over = True
        with contextlib.suppress(OSError):
            self._transport.abort()

    def _too_late(self) -> None:
        hint = f"; if it belongs to this job, pass it {FLAGS}"
        silent = self._tls is not None and not self._unproved
        self.end(f"not authenticated within {HANDSHAKE_S:.0f} s{hint if silent else ''}")

    def end(self, trouble: str = "", error: Exception | None = None) -> None:
        """Close the connection immediately, and call `Owner.lost` unless the connection had already ended."""
        if self._over:
            return
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        with contextlib.suppress(OSError):
            self._transport.abort()
        self._owner.lost(self, self._identity, trouble, error)


def is_silence(error: Exception | None) -> bool:
    """Return whether this error means that the peer or its host did not respond."""
    return isinstance(error, OSError) and error.errno in _SILENT


def _expect_signs_of_life(sock: socket.socket, lease_s: float) -> None:
    """Configure a socket to time out if the peer's host acknowledges no packet for ``lease_s`` seconds.

    This end sends a keepalive every second. The kernel of the peer's host acknowledges it even if no process can run
    there.
    """
    options = {
        socket.TCP_KEEPIDLE: KEEPALIVE_S,
        socket.TCP_KEEPINTVL: KEEPALIVE_S,
        socket.TCP_KEEPCNT: max(1, round(lease_s / KEEPALIVE_S) - 1),
        # Required for data in flight: while data is unacknowledged, the kernel sends no keepalives, but retransmits the
        # data at growing intervals.
        socket.TCP_USER_TIMEOUT: round(lease_s * 1000),
    }
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
