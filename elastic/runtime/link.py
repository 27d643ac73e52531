"""The worker's connection to the driver, read by one thread. Transports messages; makes no decisions.

With TLS, the socket itself remains plain and a `tls.TlsEndpoint` transforms the data without system calls. Thus poll()
reports all pending data, a blocked sender does not delay the reader, and a forked child cannot send a TLS shutdown.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from elastic.errors import DriverLost
from elastic.protocol import messages
from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.handshake import ClientHandshake
from elastic.protocol.messages import Address, Message, ProtocolError, Worker

if TYPE_CHECKING:
    from elastic.protocol.tls import TlsEndpoint

CONNECT_S = 20.0  # seconds to reach the driver and authenticate
SEND_S = 10.0  # seconds until a driver that reads nothing counts as lost


class Link:
    """Connection to the driver. It is established by the constructor; `start` begins to deliver messages.

    Raises:
        DriverLost: the driver cannot be reached.
        Invalid: a file of ``tls`` (paths of certificate, key and authority) is invalid.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        worker: Worker,
        *,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        self._worker = worker
        self._sending = threading.Lock()  # keeps frames in the order of their numbers
        self._tls: TlsEndpoint | None = None
        self._turning = threading.Lock()  # guards ``_tls``; never held while blocking
        self._closed = False
        if tls is not None:
            from elastic.protocol.tls import TlsEndpoint, context

            self._tls = TlsEndpoint(context(*tls, server=False), server=False)
        retrying = Retrying(
            retry=retry_if_exception_type(OSError),
            stop=stop_after_delay(CONNECT_S),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        try:
            self._socket = retrying(socket.create_connection, (address.host, address.port), 5.0)
        except OSError as error:
            raise DriverLost(
                f"no driver answers at {address} ({error}); is elasticrun still running?"
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = FramedConnection(messages.from_driver)
        self._authenticate(secret)
        # The thread waits in poll() for the connection and for this pipe, to which `poke` writes.
        self._poke_read, self._poke_write = os.pipe()
        os.set_blocking(self._poke_read, False)
        os.set_blocking(self._poke_write, False)
        self._thread: threading.Thread | None = None

    def _authenticate(self, secret: bytes) -> None:
        deadline = time.monotonic() + CONNECT_S
        try:
            self._flush()
            nonce = secrets.token_bytes(NONCE_BYTES)
            caller = ClientHandshake(secret, "worker", str(self._worker), nonce)
            proof = caller.answer(self._next(deadline))
            self.send(messages.Answer(self._worker, nonce, proof))
            caller.accepted(self._next(deadline), self._wire)
        except (OSError, ProtocolError) as error:
            with contextlib.suppress(OSError):
                self._flush()  # the alert gives the reason
            self._socket.close()
            raise DriverLost(f"the driver rejected this worker: {error}") from error

    def _next(self, deadline: float) -> Message:
        silent = True
        while (message := self._wire.next()) is None:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._socket.recv(65536)
            if not data and silent and self._tls is None:
                raise ProtocolError(
                    "it closed the connection without an answer: does it require TLS (--tls-cert, --tls-key,"
                    " --tls-ca)?"
                )
            if not data:
                raise ProtocolError("it closed the connection")
            silent = False
            self._wire.feed(self._clear(data))
            self._flush()
        return cast(Message, message)

    def _clear(self, data: bytes) -> bytes:
        """Return the received data, decrypted."""
        if self._tls is None:
            return data
        with self._turning:
            return self._tls.feed(data)

    def _flush(self) -> None:
        """Send TLS's own records, such as the handshake. A concurrent sender sends them too."""
        if self._tls is not None and self._sending.acquire(blocking=False):
            try:
                with self._turning:
                    data = self._tls.due()
                if data:
                    self._socket.sendall(data)
            finally:
                self._sending.release()

    def start(
        self,
        receive: Callable[[Message], None],
        poked: Callable[[], float],
        lost: Callable[[str], None],
    ) -> None:
        """Start the daemon thread that delivers messages, pokes and the loss of the connection.

        Args:
            receive: called for every message.
            poked: called after each poke; returns the seconds until its next call.
            lost: called with the reason when the connection is lost.
        """
        self._socket.settimeout(SEND_S)
        self._thread = threading.Thread(
            target=self._read, args=(receive, poked, lost), name="elastic-link", daemon=True
        )
        self._thread.start()

    def _read(
        self,
        receive: Callable[[Message], None],
        poked: Callable[[], float],
        lost: Callable[[str], None],
    ) -> None:
        with contextlib.suppress(ProtocolError):  # an invalid message is reported by the next read
            for message in self._wire.receive(b""):
                receive(message)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._poke_read, select.POLLIN)
        reason = "the driver closed the connection"
        pause_s = 1.0
        while not self._closed:
            ready = {fd for fd, _ in poll.poll(pause_s * 1000)}
            if self._poke_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._poke_read, 4096)
            pause_s = poked()
            if self._socket.fileno() in ready:
                try:
                    data = self._socket.recv(65536)
                    if not data:
                        break
                    for message in self._wire.receive(self._clear(data)):
                        receive(message)
                    self._flush()
                except (OSError, ProtocolError) as error:
                    reason = f"lost the connection to the driver: {error}"
                    break
        if not self._closed:
            lost(reason)

    def send(self, message: Message) -> None:
        """Send a message. Callable from any thread, but not from a signal handler.

        Raises:
            DriverLost: the connection is lost, or the driver has read nothing for `SEND_S` seconds.
        """
        body = messages.encoded(message)
        with self._sending:
            try:
                data = self._wire.frame_of(body)
                if self._tls is not None:
                    with self._turning:
                        self._tls.say(data)
                        data = self._tls.due()
                self._socket.sendall(data)
            except (OSError, ProtocolError) as error:
                raise DriverLost(f"lost the connection to the driver: {error}") from error

    def poke(self) -> None:
        """Wake the thread. Safe in a signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._poke_write, b"!")

    def close(self) -> None:
        self._closed = True
        self.poke()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_in_forked_child(self) -> None:
        """Close the descriptors in a forked child without ending the parent's connection."""
        self._closed = True
        self._socket.close()
        for fd in (self._poke_read, self._poke_write):
            with contextlib.suppress(OSError):
                os.close(fd)
