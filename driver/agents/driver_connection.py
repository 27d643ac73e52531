"""Connection of an agent to the driver: lookup, authentication and reconnection. Makes no decisions.

    searching --connected--> proving --Accepted--> open: each message goes to ``received``
        ^                                            |
        +--- closed, silent, invalid data -----------+     ``closed`` is called with the reason

The uplink searches for the driver until it is cancelled, because the driver may restart on another host. The agent
decides how long to search.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from elastic.driver.agents import messages
from elastic.driver.agents.messages import AgentAnswer, AgentId, AgentMessage, Heard
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.control_connection import Connection
from elastic.protocol.handshake import ClientHandshake
from elastic.protocol.messages import RELAY_LIMIT, ProtocolError, SendResult, encoded

CONNECT_S = 5.0  # seconds within which a connection to one address must be open and authenticated
RETRY_S = (0.05, 1.0)  # initial and maximum delay between attempts, in seconds
REJECTED = "the driver rejected this agent: see its log (another secret, another release, or TLS on one side only)"


class NoDriver(Exception):
    """Error raised when no driver can be found. The message states the reason."""


class Uplink:
    """Connection of an agent to the driver. Reconnects whenever the connection is lost.

    Args:
        agent: identity of the agent.
        secret: the job's secret.
        find: coroutine function that returns numeric addresses and ports to try in order. It may raise NoDriver.
        opened: called when both sides have authenticated.
        received: called with each message from the driver.
        closed: called with the reason when an open connection has ended.
        missing: called with the reason when no driver was found.
        lease_s: liveness timeout, in seconds.
        tls: TLS context of the connection. None means no TLS.
    """

    def __init__(
        self,
        agent: AgentId,
        secret: bytes,
        find: Callable[[], Awaitable[list[tuple[str, int]]]],
        *,
        opened: Callable[[], None],
        received: Callable[[Any], None],
        closed: Callable[[str], None],
        missing: Callable[[str], None],
        lease_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._agent = agent
        self._secret = secret
        self._find = find
        self._opened, self._received, self._closed, self._missing = (
            opened,
            received,
            closed,
            missing,
        )
        self.lease_s = lease_s
        self.tls = tls
        self.decoder = messages.to_agent
        self.open = False  # whether both sides have authenticated on the current connection
        self.bound = ""  # numeric local address of the last connection
        self._connection: Connection[AgentId] | None = None
        self._caller: ClientHandshake
        # done when both sides have authenticated in the current attempt
        self._proved: asyncio.Future[None]
        self._ended: asyncio.Future[str]  # result: the reason for the end of the open connection

    @property
    def backlog(self) -> int:
        """Number of bytes that are waiting to be sent."""
        return self._connection.backlog if self._connection is not None and self.open else 0

    async def run(self) -> None:
        """Connect to the driver, and reconnect after each connection loss, until canceled."""
        loop = asyncio.get_running_loop()
        pause_s = RETRY_S[0]
        try:
            while True:
                await self._connect()
                began = loop.time()
                reason = await self._ended
                self._hang_up()
                self._closed(reason)
                # Back off if the connection was short, because the driver would probably close the next one at once as
                # well.
                quick = loop.time() - began < RETRY_S[1]
                pause_s = min(2 * pause_s, RETRY_S[1]) if quick else RETRY_S[0]
                await asyncio.sleep(pause_s)
        finally:
            self._hang_up()

    def send(self, message: AgentMessage) -> bool:
        """Send a message without blocking. If no connection exists, drop the message and return False."""
        if self._connection is None or not self.open:
            return False
        body = encoded(message, RELAY_LIMIT)
        if not self.backlog:
            self._connection.patience = 0
        if isinstance(message, Heard) and isinstance(message.message, SendResult):
            # A worker's result may be large, so a full buffer does not mean that the driver is stuck.
            self._connection.patience += len(body)
        return self._connection.write(body)

    def drop(self, reason: str) -> None:
        """Abort the current connection, and immediately search for a driver again."""
        if self._connection is not None and self.open:
            self._connection.end(reason)

    async def finish(self, timeout_s: float = 1.0) -> None:
        """Wait until pending messages are sent, for at most ``timeout_s`` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.backlog and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.002)

    # ---- one connection --------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((OSError, ProtocolError, NoDriver)),
            wait=wait_exponential(multiplier=RETRY_S[0], max=RETRY_S[1]),
            before_sleep=lambda state: self._missing(
                str(state.outcome and state.outcome.exception())
            ),
        )
        await retrying(self._reach)

    async def _reach(self) -> None:
        failures = []
        for host, port in await self._find():
            try:
                await self._prove(host, port)
                return
            except asyncio.TimeoutError:
                failures.append(f"{host}:{port} does not answer within {CONNECT_S:g} s")
            except (OSError, ProtocolError) as error:
                failures.append(f"{host}:{port}: {_worded(error)}")
        raise NoDriver("; ".join(failures) or "the address of the driver is unknown")

    async def _prove(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_S
        self._proved, self._ended = loop.create_future(), loop.create_future()
        made = loop.create_connection(lambda: Connection(self, loop, calls=True), host, port)
        try:
            await within(made, CONNECT_S)
            await asyncio.wait({self._proved}, timeout=max(0.0, deadline - loop.time()))
            if not self._proved.done():
                raise asyncio.TimeoutError
            self._proved.result()
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.abandon()
        self._connection, self.open = None, False

    # ---- called by the connection ----------------------------------------------------------------------------------

    def opened(self, connection: Connection[AgentId]) -> None:
        self._connection = connection
        self._caller = ClientHandshake(self._secret, "agent", str(self._agent), connection.nonce)

    def authenticate(self, connection: Connection[AgentId], message: Any) -> AgentId | None:
        if not self._caller.answered:
            proof = self._caller.answer(message)
            connection.write(encoded(AgentAnswer(self._agent, connection.nonce, proof)))
            return None
        self._caller.accepted(message, connection.wire)
        self.bound, self.open = connection.local, True
        self._proved.set_result(None)
        self._opened()
        return self._agent

    def receive(self, peer: AgentId, message: Any) -> None:
        self._received(message)

    def lost(
        self,
        connection: Connection[AgentId],
        peer: AgentId | None,
        trouble: str,
        error: Exception | None,
    ) -> None:
        if error is not None and not isinstance(error, OSError):
            (self._ended if self.open else self._proved).set_exception(error)
        elif self.open:
            reason = trouble or (_worded(error) if error else "the driver closed the connection")
            self._ended.set_result(reason)
        else:
            self._proved.set_exception(error or ProtocolError(trouble or REJECTED))


def _worded(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
