"""Client end of a control connection, for threads: TLS, handshake and frames.

With TLS, the socket itself remains plain and a `tls.TlsEndpoint` encrypts and decrypts in memory. Therefore poll()
reports all pending data, a blocked sender does not delay the reader, and a forked child cannot send a TLS shutdown.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.handshake import ClientHandshake
from elastic.protocol.messages import ProtocolError, encoded

if TYPE_CHECKING:
    import ssl

    from elastic.protocol.tls import TlsEndpoint

_READ_BYTES = 1 << 16


class ConnectionClosed(ProtocolError):
    """Error raised when the peer has closed the connection."""


class ControlClient:
    """Client end of a connection to the driver. Any thread may send. Only one thread at a time may receive.

    Args:
        sock: connected socket, which the client owns.
        decoder: decoder of the driver's messages.
        tls: TLS context, or None without TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._tls: TlsEndpoint | None = None
        if tls is not None:
            # imported only when needed, because most jobs do not use TLS
            from elastic.protocol.tls import TlsEndpoint

            self._tls = TlsEndpoint(tls, server=False)
        self._wire = FramedConnection(decoder)
        self._sending = threading.Lock()  # keeps frames in the order of their numbers
        self._turning = threading.Lock()  # guards ``_tls``; never held during a blocking call

    def authenticate(
        self,
        secret: bytes,
        role: str,
        name: str,
        answer: Callable[[bytes, bytes], msgspec.Struct],
        within_s: float,
    ) -> None:
        """Perform the handshake, in which both ends authenticate each other. On failure, close the connection.

        Args:
            secret: the job's secret.
            role: role of this end, which its proof covers.
            name: name of this end, which its proof covers.
            answer: called with this end's nonce and proof; returns the message that answers the driver's challenge.
            within_s: timeout in seconds.

        Raises:
            OSError: the connection failed, or the timeout has expired (TimeoutError).
            ProtocolError: the driver lacks the secret, or sent an invalid message.
        """
        deadline = time.monotonic() + within_s
        nonce = secrets.token_bytes(NONCE_BYTES)
        caller = ClientHandshake(secret, role, name, nonce)
        try:
            self._flush()
            proof = caller.answer(self.next(deadline))
            self.send(encoded(answer(nonce, proof)))
            caller.accepted(self.next(deadline), self._wire)
        except (OSError, ProtocolError):
            with contextlib.suppress(OSError):
                self._flush()  # Send the TLS alert, which tells the peer the reason.
            self.socket.close()
            raise

    def next(self, deadline: float) -> Any:
        """Block until a complete message has arrived, and return it.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection failed.
            ProtocolError: the peer sent an invalid message.
        """
        while (message := self._wire.next()) is None:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            self.read()
        return message

    def messages(self) -> Iterator[Any]:
        """Yield the complete messages among the bytes read so far. Raises ProtocolError if a message is malformed."""
        return self._wire.receive(b"")

    def read(self) -> None:
        """Read available bytes from the socket, once. This method blocks until bytes are available.

        Raises:
            OSError: the connection failed, or the peer closed it (ConnectionClosed).
            ProtocolError: the peer sent invalid bytes.
        """
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionClosed("the peer closed the connection: see its log")
        if self._tls is not None:
            with self._turning:
                data = self._tls.feed(data)
            self._flush()
        self._wire.feed(data)

    def _flush(self) -> None:
        """Send pending TLS records, such as those of the handshake, unless a concurrent sender has sent them."""
        if self._tls is not None and self._sending.acquire(blocking=False):
            try:
                with self._turning:
                    data = self._tls.due()
                if data:
                    self.socket.sendall(data)
            finally:
                self._sending.release()

    def send(self, body: bytes) -> None:
        """Send an encoded message. This method blocks for at most the socket's timeout.

        Raises:
            OSError: the connection failed, or the timeout has expired.
            ProtocolError: the TLS connection failed.
        """
        with self._sending:
            data = self._wire.frame_of(body)
            if self._tls is not None:
                with self._turning:
                    self._tls.send(data)
                    data = self._tls.due()
            self.socket.sendall(data)
