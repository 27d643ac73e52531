"""An agent's connection to the driver: lookup, authentication, and reconnection. Moves messages; decides nothing.

    searching --connected--> proving --Accepted--> open: each message goes to ``heard``
        ^                                            |
        +--- closed, silent, invalid data -----------+     ``closed`` is called with the reason

It searches for the driver until it is cancelled, since the driver may be restarted, possibly elsewhere. Its owner
decides how long that makes sense.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from elastic.driver.agents import messages
from elastic.driver.agents.messages import AgentAnswer, AgentId, AgentMessage, Heard
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.keepalive import expect_signs_of_life
from elastic.protocol.framing import NONCE_BYTES, FramedConnection
from elastic.protocol.handshake import ClientHandshake
from elastic.protocol.messages import RELAY_LIMIT, Message, ProtocolError, SendResult, encoded
from elastic.protocol.tls import explained

CONNECT_S = 5.0  # seconds to connect to one address and authenticate
RETRY_S = (0.05, 1.0)  # seconds between two attempts: first, longest
BACKLOG_LIMIT = 64 * 1024 * 1024  # bytes; a driver that reads nothing is considered lost


class NoDriver(Exception):
    """No driver to connect to, or not the expected one. The text is the reason."""


class Uplink:
    """Connection of an agent to the driver.

    Args:
        agent: identity of the agent.
        secret: the job's secret.
        find: returns numeric addresses and ports to try, in order; it may wait, and raises NoDriver.
        opened: called when both sides have authenticated.
        heard: called for each message.
        closed: called with the reason when an open connection ended.
        missing: called with the reason when no driver was found.
        lease_s: liveness timeout.
        tls: context of the connection; None without TLS.
    """

    def __init__(
        self,
        agent: AgentId,
        secret: bytes,
        find: Callable[[], Awaitable[list[tuple[str, int]]]],
        *,
        opened: Callable[[], None],
        heard: Callable[[Any], None],
        closed: Callable[[str], None],
        missing: Callable[[str], None],
        lease_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._agent = agent
        self._secret = secret
        self._find = find
        self._opened, self._heard, self._closed, self._missing = opened, heard, closed, missing
        self._lease_s = lease_s
        self._tls = tls
        self._wire = FramedConnection(messages.to_agent)
        self._writer: asyncio.StreamWriter | None = None
        self._drop_reason = ""
        self._results = 0  # bytes of functions' values that may be pending
        self.bound = ""  # numeric address of this host in the last connection

    @property
    def open(self) -> bool:
        return self._writer is not None

    @property
    def backlog(self) -> int:
        """Number of bytes that wait to be sent."""
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = RETRY_S[0]
        try:
            while True:
                reader = await self._connected()
                began = loop.time()
                self._opened()
                reason = await self._read(reader)
                self._hang_up()
                self._closed(reason)
                # A driver that closes immediately would do so again, so that retries are delayed.
                quick = loop.time() - began < RETRY_S[1]
                pause_s = min(2 * pause_s, RETRY_S[1]) if quick else RETRY_S[0]
                await asyncio.sleep(pause_s)
        finally:
            self._hang_up()

    def send(self, message: AgentMessage) -> bool:
        """Send a message without blocking. Returns False without a connection, in which case it is dropped."""
        if self._writer is None:
            return False
        frame = self._wire.frame_of(encoded(message, RELAY_LIMIT))
        if not self.backlog:
            self._results = 0
        if isinstance(message, Heard) and isinstance(message.message, SendResult):
            # Each worker has one, which may be large: no sign of a stuck driver.
            self._results += len(frame)
        self._writer.write(frame)
        if self.backlog > BACKLOG_LIMIT + self._results:
            self.drop(f"it has not read {BACKLOG_LIMIT >> 20} MiB that were sent")
            return False
        return True

    def drop(self, reason: str) -> None:
        """Abort this connection, and immediately search for the next one."""
        if self._writer is not None:
            self._drop_reason = reason
            self._writer.transport.abort()

    async def finish(self, timeout_s: float = 1.0) -> None:
        """Wait until pending messages are sent, within a limit."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.backlog and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.002)

    # ---- one connection --------------------------------------------------------------------------------------------

    async def _connected(self) -> asyncio.StreamReader:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((OSError, ProtocolError, NoDriver)),
            wait=wait_exponential(multiplier=RETRY_S[0], max=RETRY_S[1]),
            before_sleep=lambda state: self._missing(
                str(state.outcome and state.outcome.exception())
            ),
        )
        async for attempt in retrying:
            with attempt:
                return await self._reach()
        raise AssertionError("not reachable, because the connection is retried indefinitely")

    async def _reach(self) -> asyncio.StreamReader:
        failures = []
        for host, port in await self._find():
            try:
                return await within(self._prove(host, port), CONNECT_S)
            except asyncio.TimeoutError:
                failures.append(f"{host}:{port} does not answer within {CONNECT_S:g} s")
            except (OSError, ProtocolError) as error:
                failures.append(f"{host}:{port}: {_worded(error)}")
        raise NoDriver("; ".join(failures) or "no address to try")

    async def _prove(self, host: str, port: int) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(host, port, ssl=self._tls)
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            expect_signs_of_life(sock, self._lease_s)
            wire = FramedConnection(messages.to_agent)
            nonce = secrets.token_bytes(NONCE_BYTES)
            caller = ClientHandshake(self._secret, "agent", str(self._agent), nonce)
            proof = caller.answer(await self._next(reader, wire))
            writer.write(wire.frame(AgentAnswer(self._agent, nonce, proof)))
            caller.accepted(await self._next(reader, wire), wire)
        except BaseException:
            writer.transport.abort()
            raise
        self._wire, self._writer, self._drop_reason = wire, writer, ""
        self.bound = sock.getsockname()[0]
        return reader

    async def _next(self, reader: asyncio.StreamReader, wire: FramedConnection) -> Message:
        while (message := wire.next()) is None:
            data = await reader.read(65536)
            if not data:
                raise ProtocolError(
                    "the driver rejected this agent: see its log (another secret, another release, or TLS on one"
                    " side only)"
                )
            wire.feed(data)
        assert isinstance(message, Message | AgentMessage)
        return message  # type: ignore[return-value]

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Read until the end of the connection; return the reason."""
        try:
            self._receive_bytes(b"")
            while data := await reader.read(256 * 1024):
                self._receive_bytes(data)
        except (OSError, ProtocolError) as error:
            return self._drop_reason or _worded(error)
        return self._drop_reason or "the driver closed the connection"

    def _receive_bytes(self, data: bytes) -> None:
        for message in self._wire.receive(data):
            self._heard(message)
            if self._drop_reason:
                return  # the remaining messages are from a driver that is no longer served

    def _hang_up(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.transport.abort()
            self._writer = None


def _worded(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return explained(error)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
