"""Bandwidth measurement by transfers between the agents of two hosts. Makes no decisions.

The peer's agent listens. The measured host's agent connects, and both sides prove knowledge of the job's secret. To
measure one direction, the measured host's agent sends chunks, which the peer's agent acknowledges. To measure the other
direction, it requests chunks from the peer's agent. Few chunks are in flight, and each transfer ends after TRANSFER_S,
to limit the effect on training over a slow network. The result is the best of several transfers, because a busy host
delays some of them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

import msgspec

from elastic.driver.agents.messages import (
    AgentAnswer,
    AgentId,
    AgentMessage,
    BandwidthFound,
    BandwidthServed,
)
from elastic.driver.events import BandwidthMeasured
from elastic.driver.network.blocking_calls import to_thread
from elastic.driver.network.control_server import Callers, ControlServer
from elastic.driver.network.secret import derived
from elastic.driver.output_interfaces import Log
from elastic.protocol.messages import Accepted, Address, Challenge, ProtocolError, encoded
from elastic.rpc.client import ControlClient

ROLE = "bandwidth"
CHUNK_BYTES = 1 << 16
CHUNKS_MAX = 32  # maximum number of chunks in one transfer (2 MiB)
IN_FLIGHT = 4  # maximum number of chunks in flight
TRANSFER_S = 0.02  # seconds after which a transfer sends no more chunks
ROUNDS = 3  # number of transfers in each direction
PAUSE_S = 0.05  # pause between rounds, in seconds
LIMIT_S = 3.0  # time limit for the connection and all transfers, in seconds
SERVE_S = 5.0  # seconds for which an agent listens for the other agent


class BandwidthMessage(msgspec.Struct, frozen=True, tag=True):
    """Base class of the messages of a measurement."""


class Chunk(BandwidthMessage, frozen=True):
    """Chunk of data, sent in either direction."""

    data: bytes


class ChunkReceived(BandwidthMessage, frozen=True):
    """Acknowledgement, by the listening agent, of a `Chunk`."""


class Fetch(BandwidthMessage, frozen=True):
    """Request for a `Chunk`."""


_from_caller = msgspec.msgpack.Decoder(AgentAnswer | Chunk | Fetch)
_from_server = msgspec.msgpack.Decoder(Challenge | Accepted | Chunk | ChunkReceived)
MEASURING: Callers[AgentId] = Callers(
    ROLE, _from_caller, AgentAnswer, lambda answer: answer.agent, replaces=True
)


class BandwidthMeter:
    """One agent's side of bandwidth measurements. It can listen or connect.

    Args:
        agent: identity of the agent.
        secret: the job's secret.
        tls: TLS contexts for connecting and for listening; None without TLS.
        send: sends a message to the driver.
        log: called with the level and the text of each log line.
    """

    def __init__(
        self,
        agent: AgentId,
        secret: bytes,
        tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
        *,
        send: Callable[[AgentMessage], object],
        log: Log,
    ) -> None:
        self._agent, self._secret, self._send, self._log = agent, derived(secret, ROLE), send, log
        self._tls = tls
        self._server: ControlServer[AgentId] | None = None

    async def serve(self, interface: str, caller: str) -> None:
        """Listen on a port of ``interface`` for the agent of the host ``caller``, and report the address.

        Closes an earlier listener. The new listener is closed after SERVE_S seconds.
        """
        await self.close()
        self._server = server = ControlServer(
            secret=self._secret, log=self._log, callers=MEASURING, tls=self._tls[1]
        )

        def received(agent: AgentId, message: Chunk | Fetch) -> None:
            fetched = isinstance(message, Fetch)
            server.send(agent, Chunk(bytes(CHUNK_BYTES)) if fetched else ChunkReceived())

        try:
            address = await server.open(
                interface,
                received=received,
                gone=lambda agent, silent: None,
                expected=lambda agent: agent.host == caller,
            )
        except OSError as error:
            self._send(BandwidthServed(caller, None, error.strerror or str(error)))
            return
        self._send(BandwidthServed(caller, address))
        await asyncio.sleep(SERVE_S)
        await server.close()

    async def call(self, peer: str, address: Address) -> None:
        """Measure the bandwidth to the host ``peer``, whose agent listens at ``address``, and report it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        sent = received = None
        trouble = ""
        try:
            sent, received = await to_thread(
                measure, self._agent, address, self._secret, self._tls[0], within_s=LIMIT_S + 1.0
            )
        except asyncio.TimeoutError:
            trouble = "the measurement did not end in time"
        except (OSError, ProtocolError) as error:
            trouble = getattr(error, "strerror", None) or str(error) or type(error).__name__
        took_s = round(loop.time() - began, 3)
        event = BandwidthMeasured(self._agent.host, peer, sent, received, trouble, took_s)
        self._send(BandwidthFound(event))

    async def close(self) -> None:
        """Stop listening, and close the connection."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()


def measure(
    agent: AgentId, address: Address, secret: bytes, tls: ssl.SSLContext | None
) -> tuple[float | None, float | None]:
    """Measure the bandwidth to the host at ``address``. Blocks for at most LIMIT_S seconds.

    Args:
        agent: identity of the agent of this host.
        address: address at which the agent of the other host listens.
        secret: key for measurements, derived from the job's secret.
        tls: TLS context of the connection; None without TLS.

    Returns:
        Bytes per second sent, and bytes per second received. None for a direction that was not measured within the
        limit.

    Raises:
        OSError: the connection failed.
        ProtocolError: the other end lacks the secret.
    """
    deadline = time.monotonic() + LIMIT_S
    best: dict[type[BandwidthMessage], float] = {}
    with socket.create_connection((address.host, address.port), LIMIT_S) as sock:
        client = ControlClient(sock, _from_server, tls)
        client.authenticate(
            secret,
            ROLE,
            str(agent),
            lambda nonce, proof: AgentAnswer(agent, nonce, proof),
            max(0.0, deadline - time.monotonic()),
        )
        for number in range(2 * ROUNDS):
            request = Fetch() if number % 2 else Chunk(bytes(CHUNK_BYTES))
            rate, complete = _transfer(client, encoded(request), deadline)
            if not complete and rate == 0.0:
                # not a low bandwidth of the measured host, so report no result
                raise TimeoutError("the other host did not answer in time: check its network")
            best[type(request)] = max(rate, best.get(type(request), 0.0))
            if not complete:
                break
            if number % 2:
                time.sleep(PAUSE_S)
    return best.get(Chunk), best.get(Fetch)


def _transfer(client: ControlClient, request: bytes, deadline: float) -> tuple[float, bool]:
    """Transfer chunks in one direction. Return bytes per second, and whether the transfer ended before the deadline."""
    began = now = time.monotonic()
    sent = answered = 0
    try:
        while answered < sent or sent == 0:
            now = time.monotonic()
            while sent < min(CHUNKS_MAX, answered + IN_FLIGHT) and now < began + TRANSFER_S:
                client.socket.settimeout(max(0.001, deadline - now))
                client.send(request)
                sent += 1
                now = time.monotonic()
            client.next(deadline)
            answered += 1
    except TimeoutError:
        return answered * CHUNK_BYTES / (time.monotonic() - began), False
    return answered * CHUNK_BYTES / (time.monotonic() - began), True
