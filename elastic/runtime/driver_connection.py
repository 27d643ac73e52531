"""Connection of a worker to the driver, with a thread that reads from it. This module makes no decisions."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from elastic.errors import DriverLost
from elastic.protocol import messages
from elastic.protocol.messages import Address, Message, ProtocolError, Worker
from elastic.rpc.client import ConnectionClosed, ControlClient

CONNECT_S = 20.0  # timeout in seconds for connecting and authenticating to the driver
# timeout in seconds for sending; a driver that reads nothing for this time counts as lost
SEND_S = 10.0


class Link:
    """Connection of this worker to the driver. The constructor connects, and `start` begins to deliver messages.

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
        self._closed = False
        secured = None
        if tls is not None:
            from elastic.protocol.tls import context

            secured = context(*tls, server=False)
        retrying = Retrying(
            retry=retry_if_exception_type(OSError),
            stop=stop_after_delay(CONNECT_S),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        try:
            sock = retrying(socket.create_connection, (address.host, address.port), 5.0)
        except OSError as error:
            raise DriverLost(
                f"no driver responds at {address} ({error}): check that elasticrun is still running"
            ) from error
        self._client = ControlClient(sock, messages.from_driver, secured)
        try:
            self._client.authenticate(
                secret,
                "worker",
                str(worker),
                lambda nonce, proof: messages.Answer(worker, nonce, proof),
                CONNECT_S,
            )
        except TimeoutError as error:
            raise DriverLost(
                f"the driver at {address} did not authenticate this worker within {CONNECT_S:g} s: check that its"
                " host is not overloaded"
            ) from error
        except (OSError, ProtocolError) as error:
            closed = isinstance(error, ConnectionClosed) and tls is None
            hint = "; the driver may require TLS (--tls-cert, --tls-key, --tls-ca)"
            raise DriverLost(
                f"the driver rejected this worker: {error}{hint if closed else ''}"
            ) from error
        # The thread polls the connection and this pipe, to which `poke` writes.
        self._poke_read, self._poke_write = os.pipe()
        os.set_blocking(self._poke_read, False)
        os.set_blocking(self._poke_write, False)
        self._thread: threading.Thread | None = None

    def start(
        self,
        receive: Callable[[Message], None],
        poked: Callable[[], float],
        lost: Callable[[str], None],
    ) -> None:
        """Start the daemon thread, which delivers messages, pokes and the loss of the connection to these callbacks.

        Args:
            receive: called for every message.
            poked: called after each poke and when its own timeout has expired; returns the seconds until its next call.
            lost: called with the reason if the connection is lost.
        """
        self._client.socket.settimeout(SEND_S)
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
        with contextlib.suppress(ProtocolError):  # the next read raises the same error again
            for message in self._client.messages():
                receive(message)
        poll = select.poll()
        poll.register(self._client.socket, select.POLLIN)
        poll.register(self._poke_read, select.POLLIN)
        reason = "the driver closed the connection"
        pause_s = 1.0
        while not self._closed:
            ready = {fd for fd, _ in poll.poll(pause_s * 1000)}
            if self._poke_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._poke_read, 4096)
            pause_s = poked()
            if self._client.socket.fileno() in ready:
                try:
                    self._client.read()
                    for message in self._client.messages():
                        receive(message)
                except ConnectionClosed:
                    break
                except (OSError, ProtocolError) as error:
                    reason = f"lost the connection to the driver: {error}"
                    break
        if not self._closed:
            lost(reason)

    def send(self, message: Message) -> None:
        """Send a message. This method may be called from any thread, but not from a signal handler.

        Raises:
            DriverLost: the connection is lost, or the driver has read no data for `SEND_S` seconds.
        """
        body = messages.encoded(message)
        try:
            self._client.send(body)
        except (OSError, ProtocolError) as error:
            raise DriverLost(
                f"the connection to the driver was lost: {error}. Check that elasticrun is still running"
            ) from error

    def poke(self) -> None:
        """Wake the link thread. This method is safe in a signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._poke_write, b"!")

    def close(self) -> None:
        self._closed = True
        self.poke()
        with contextlib.suppress(OSError):
            self._client.socket.shutdown(socket.SHUT_RDWR)
        self._client.socket.close()

    def close_in_forked_child(self) -> None:
        """Close the descriptors that a forked child has inherited. This method is called in the child.

        The parent's connection stays open.
        """
        self._closed = True
        self._client.socket.close()
        for fd in (self._poke_read, self._poke_write):
            with contextlib.suppress(OSError):
                os.close(fd)
