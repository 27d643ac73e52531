"""The driver's end of every worker's control connection: handshake, frames in, frames out. Decides nothing.

    connected --Challenge-->   waiting for an Answer: HANDSHAKE_LIMIT bytes, HANDSHAKE_S seconds
    Answer    --Accepted-->    open: each message goes to ``heard``
    closed, broken or no message of the protocol: ``gone``, once

Each host's kernel acknowledges a small packet every second, whatever the processes there do. If for ``lease_s`` nothing
is acknowledged, the connection ends with a timeout: ``gone`` is told that it was ``silent``.

The worker proves ``proof(secret, "worker", challenge.nonce, answer.nonce, worker)``, the driver proves
``proof(secret, "driver", answer.nonce, challenge.nonce, worker)``. A worker says nothing between its Answer and the
driver's Accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import Any

from elastic.driver.launch.interface import Log
from elastic.driver.settings import Settings
from elastic.protocol import (
    HANDSHAKE_LIMIT,
    VERSION,
    Accepted,
    Address,
    Answer,
    Challenge,
    Hello,
    Inbox,
    Message,
    ProtocolError,
    Worker,
    encode,
    proof,
)

HANDSHAKE_S = 5.0
NONCE_BYTES = 32
UNKNOWN_LIMIT = 4096  # connections that have not proved anything yet
BACKLOG_LIMIT = 64 * 1024 * 1024  # bytes; a worker that reads nothing is cut off
DRAIN_LIMIT = 16 * 1024 * 1024  # bytes
REFUSALS_S = 5.0  # between two log lines about refused connections
CLOSE_S = 1.0
KEEPALIVE_S = 1  # the kernel's shortest

# Nothing was closed. Where routers report that they can't reach a host, the kernel gives that as its reason.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Server:
    """Listens for workers. ``secret`` is the job's; nobody is heard who does not prove to know it."""

    def __init__(self, *, secret: bytes, log: Log, lease_s: float = Settings.lease_s) -> None:
        self.secret = secret
        self.lease_s = lease_s
        self._log = log
        self._heard: Callable[[Worker, Any], None] = lambda worker, message: None
        self._gone: Callable[[Worker, bool], None] = lambda worker, silent: None
        self._expected: Callable[[Worker], bool] = lambda worker: False
        self._server: asyncio.Server | None = None
        self._connections: dict[Worker, _Connection] = {}
        self._unknown: set[_Connection] = set()
        self._refused = 0  # since the last line about them
        self._refused_at = float("-inf")

    async def open(
        self,
        interface: str,
        port: int = 0,
        *,
        heard: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
        expected: Callable[[Worker], bool],
    ) -> Address:
        """Listen on one address; port 0 lets the system choose. Raises OSError.

        ``expected`` tells which workers may connect, ``heard`` gets their messages, ``gone`` is told once when the
        connection of a worker ends, and whether it ended in silence. All are called in the event loop's thread.
        """
        self._heard, self._gone, self._expected = heard, gone, expected
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self, loop), interface, port, backlog=4096
        )
        bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return Address(bound[0], bound[1])

    def send(self, worker: Worker, message: Message) -> bool:
        """Send without blocking. False when the worker is not connected: then the message is dropped."""
        connection = self._connections.get(worker)
        return connection is not None and connection.write(encode(message))

    def broadcast(self, workers: Iterable[Worker], message: Message) -> None:
        """The same message to all of these that are connected; encoded once."""
        frame = encode(message)
        for worker in workers:
            connection = self._connections.get(worker)
            if connection is not None:
                connection.write(frame)

    def connected(self, worker: Worker) -> bool:
        return worker in self._connections

    def drain(self, worker: Worker) -> None:
        """Hear now what a worker's connection holds: a process that is gone may have said something just before."""
        connection = self._connections.get(worker)
        if connection is not None:
            connection.drain()

    def disconnect(self, worker: Worker) -> None:
        """Drop the connection; ``gone`` is called before this returns."""
        connection = self._connections.get(worker)
        if connection is not None:
            connection.abort()

    async def close(self) -> None:
        """Stop listening, send what is buffered within CLOSE_S, drop every connection. ``gone`` is not called."""
        self._gone = lambda worker, silent: None
        if self._server is not None:
            self._server.close()
        for connection in list(self._unknown):
            connection.abort()
        # A worker that does not read must not hold up the end.
        deadline = asyncio.get_running_loop().time() + CLOSE_S
        for connection in list(self._connections.values()):
            while connection.backlog and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.002)
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    # ---- called by connections

    def opened(self, connection: _Connection) -> bool:
        if len(self._unknown) >= UNKNOWN_LIMIT:
            return False
        self._unknown.add(connection)
        return True

    def authenticate(self, connection: _Connection, nonce: bytes, answer: Any) -> Worker:
        """Who answers the challenge. Raises ProtocolError with the reason to refuse."""
        if not isinstance(answer, Answer):
            raise ProtocolError(f"{type(answer).__name__} came before the Answer")
        if answer.version != VERSION:
            raise ProtocolError(
                f"it speaks version {answer.version} of the protocol, the driver {VERSION};"
                " install the same release everywhere"
            )
        expected = proof(self.secret, "worker", nonce, answer.nonce, answer.worker)
        # The nonce's length is fixed: the proof's text must have one reading only.
        if len(answer.nonce) != NONCE_BYTES or not hmac.compare_digest(answer.proof, expected):
            raise ProtocolError("it does not know the job's secret")
        if not self._expected(answer.worker):
            raise ProtocolError(f"{answer.worker} is no worker that runs")
        self.drain(answer.worker)  # an earlier connection may have ended unnoticed
        if answer.worker in self._connections:
            raise ProtocolError(f"{answer.worker} has a connection already")
        self._unknown.discard(connection)
        self._connections[answer.worker] = connection
        own = proof(self.secret, "driver", answer.nonce, nonce, answer.worker)
        connection.write(encode(Accepted(own)))
        return answer.worker

    def hear(self, worker: Worker, message: Any) -> None:
        if isinstance(message, Answer):
            raise ProtocolError("a second Answer")
        if isinstance(message, Hello) and message.worker != worker:
            raise ProtocolError(f"it says hello as {message.worker}")
        self._heard(worker, message)

    def lost(
        self, connection: _Connection, worker: Worker | None, trouble: str, silent: bool
    ) -> None:
        """A connection has ended; ``trouble`` is set if it was closed for a reason."""
        if worker is None:
            self._unknown.discard(connection)
            if trouble:
                self._refuse(connection.peer, trouble)
            return
        if trouble:
            self._log("warning", f"the connection of {worker} was closed: {trouble}")
        if self._connections.get(worker) is connection:
            del self._connections[worker]
            self._gone(worker, silent)

    def _refuse(self, peer: str, trouble: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._refused_at < REFUSALS_S:
            self._refused += 1
            return
        more = f" ({self._refused} others were refused before)" if self._refused else ""
        self._refused_at, self._refused = now, 0
        self._log("warning", f"refused a connection from {peer}: {trouble}{more}")


class _Connection(asyncio.Protocol):
    """One connection, from accept to close."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._inbox = Inbox(side="worker", limit=HANDSHAKE_LIMIT)
        self._unproved = 0  # bytes received before the proof
        self._worker: Worker | None = None
        self._over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self.peer = "?"

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent."""
        return 0 if self._over else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_signs_of_life()
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "?"
        if not self._server.opened(self):
            self._end(f"{UNKNOWN_LIMIT} others have not said yet who they are")
            return
        self._deadline = self._loop.call_later(HANDSHAKE_S, self._too_late)
        self.write(encode(Challenge(self._nonce)))

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        try:
            if self._worker is None:
                self._unproved += len(data)
                if self._unproved > HANDSHAKE_LIMIT:
                    raise ProtocolError(f"more than {HANDSHAKE_LIMIT} bytes before a proof")
                messages = self._inbox.receive(data)
                if not messages:
                    return
                if len(messages) > 1:
                    raise ProtocolError("it went on before it was accepted")
                self._worker = self._server.authenticate(self, self._nonce, messages[0])
                self._inbox.limit = Inbox(side="worker").limit
                assert self._deadline is not None
                self._deadline.cancel()
            else:
                for message in self._inbox.receive(data):
                    self._server.hear(self._worker, message)
        except ProtocolError as error:
            self._end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("", silent=_is_silence(exc))

    def write(self, frame: bytes) -> bool:
        """Send or buffer; False if the connection is over."""
        if self._over or self._transport.is_closing():
            return False
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > BACKLOG_LIMIT:
            self._end(f"it has not read for {BACKLOG_LIMIT >> 20} MiB")
            return False
        return True

    def drain(self) -> None:
        """Read what is there without waiting, up to the end of the stream."""
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

    def _too_late(self) -> None:
        self._end(f"no proof within {HANDSHAKE_S:.0f} s")

    def _expect_signs_of_life(self) -> None:
        options = {
            socket.TCP_KEEPIDLE: KEEPALIVE_S,
            socket.TCP_KEEPINTVL: KEEPALIVE_S,
            socket.TCP_KEEPCNT: max(1, round(self._server.lease_s / KEEPALIVE_S) - 1),
            # Also where bytes are under way, for which there are no keepalives but repetitions at growing intervals.
            socket.TCP_USER_TIMEOUT: round(self._server.lease_s * 1000),
        }
        for option, value in options.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _end(self, trouble: str, *, silent: bool = False) -> None:
        """Close at once. The server is told once, before this returns."""
        if self._over:
            return
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        with contextlib.suppress(OSError):
            self._transport.abort()
        self._server.lost(self, self._worker, trouble, silent)


def _is_silence(error: Exception | None) -> bool:
    return isinstance(error, OSError) and error.errno in _SILENT
