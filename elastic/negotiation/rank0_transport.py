"""Rank 0's end of the negotiation: connects the other ranks to the coordinator, which runs in rank 0's process.

`coordinator` makes the decisions.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from elastic.errors import CollectiveFailed
from elastic.monitoring import timeline
from elastic.negotiation.coordinator import Coordinator
from elastic.negotiation.messages import RequestList, ResponseList
from elastic.negotiation.pending import row
from elastic.negotiation.transport import FRAME_LIMIT, KEY, ControllerSettings, RankHello
from elastic.protocol.framing import derived
from elastic.protocol.messages import ProtocolError
from elastic.rendezvous.store import StoreListener
from elastic.rendezvous.worker_settings import COLLECTIVE_TIMEOUT_S, Environment
from elastic.rpc.server import SealedCaller, SealedServer

LOOK_S = 1.0  # interval in seconds between checks for stalled collectives
BEAT_S = 5.0  # interval in seconds between heartbeats
SILENT_BEATS = 6
_HELLO_LIMIT = 256  # maximum number of bytes received from a peer before it is authenticated
_HELLO_S = 10.0

_hellos: msgspec.msgpack.Decoder[RankHello] = msgspec.msgpack.Decoder(RankHello)
_offers: msgspec.msgpack.Decoder[RequestList] = msgspec.msgpack.Decoder(RequestList)
_encoder = msgspec.msgpack.Encoder()


def last_resort_s(env: Environment) -> float:
    """Return the stall timeout of a collective in seconds, or 0 for no limit.

    With a driver there is no limit, because the driver detects stuck workers and fences them.
    """
    last_s = env.stall_shutdown_s or max(env.collective_timeout_s, COLLECTIVE_TIMEOUT_S)
    return last_s if env.driver is None else 0.0


def silence_s(env: Environment) -> float:
    """Return the number of seconds without messages after which rank 0 counts as lost, or 0 for no limit.

    Stall warnings are logged earlier.
    """
    last_s = last_resort_s(env)
    return last_s + SILENT_BEATS * BEAT_S if last_s else 0.0


class LocalController:
    """Rank 0's end of the negotiation. Requests are processed immediately, in the thread that makes or receives them.

    ``died(why)`` is called in the server thread if the server fails.
    """

    def __init__(
        self,
        rules: ControllerSettings,
        listener: StoreListener,
        size: int,
        generation: int,
        env: Environment,
        died: Callable[[str], None],
    ) -> None:
        self.rules = rules
        # Rank 0's queue of decisions and wake-ups. None marks the end.
        self.own: queue.SimpleQueue[ResponseList | str | None] = queue.SimpleQueue()
        self._size = size
        self._coordinator = Coordinator(size, env.cache_capacity)
        # Guards the coordinator and the two fields below, and keeps decisions in order while they are published.
        self._deciding = threading.Lock()
        self._connected: dict[int, SealedCaller] = {}
        # encoded messages for ranks that have not connected yet
        self._early: dict[int, list[bytes]] = {}
        self._warn_s = env.stall_warning_s
        self._end_s = last_resort_s(env)
        self._look_at = time.monotonic() + LOOK_S
        self._beat_at = time.monotonic() + BEAT_S
        # The limit must admit all ranks, because they connect at about the same time, and each is unauthenticated until
        # its first message.
        self._server = SealedServer(
            listener.socket,
            f"elastic-controller-{generation}",
            _hellos,
            derived(env.secret, KEY, generation),
            received=self._received,
            lost=lambda caller: self._left(caller.identity),
            first_limit=_HELLO_LIMIT,
            first_s=_HELLO_S,
            nonce=rules.nonce,
            extra=size,
            idle_s=min(LOOK_S, BEAT_S),
            tick=self._tick,
            died=lambda error: died(
                f"the negotiation on rank 0 ended: {type(error).__name__}: {error}"
            ),
        )
        self.close_sockets = self._server.close_sockets
        self._server.start()

    def send(self, offer: RequestList) -> None:
        self._offered(0, offer)

    def publish(self, decision: ResponseList) -> None:
        """Send a decision to all its members, except ranks that have left. The caller must hold ``_deciding``."""
        body = _encoder.encode(decision)
        members = decision.members or range(self._size)
        for rank in members:
            if rank in self._connected:
                self._server.send(self._connected[rank], body)
            elif rank != 0:
                self._early.setdefault(rank, []).append(body)
        if 0 in members:
            # Notify rank 0 last: its process may exit as soon as it has the decision, before the other ranks have been
            # notified.
            self.own.put(decision)

    # ---- calls in the server thread --------------------------------------------------------------------------------

    def _received(self, caller: SealedCaller, message: Any) -> None:
        if caller.identity is not None:
            self._offered(caller.identity, message)
            return
        rank = message.rank
        with self._deciding:
            if not 0 < rank < self._size or rank in self._connected:
                raise ProtocolError(
                    f"rank {rank} connected twice, or is not a rank of this world of {self._size}:"
                    " start each rank once"
                )
            caller.wire.expect(_offers, FRAME_LIMIT)
            caller.identity = rank
            self._connected[rank] = caller
            for body in self._early.pop(rank, []):
                self._server.send(caller, body)

    def _tick(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._server.beat()

    def _offered(self, rank: int, offer: RequestList) -> None:
        with self._deciding:
            if timeline.on:
                for name in self._coordinator.named(offer):
                    timeline.tick(row(name, offer.members), rank)
            for decision in self._coordinator.offer(rank, offer):
                self.publish(decision)

    def _left(self, rank: int) -> None:
        with self._deciding:
            for decision in self._coordinator.leave(rank, "left: its connection was closed"):
                self.publish(decision)

    def _look(self) -> None:
        if self._warn_s <= 0 and self._end_s <= 0:
            return
        with self._deciding:
            stalled, decisions = self._coordinator.stalled(
                time.monotonic(), self._warn_s, self._end_s
            )
            for decision in decisions:
                self.publish(decision)
        for sentence in stalled:
            print(f"elastic: stalled: {sentence}", file=sys.stderr, flush=True)

    # ---- calls in rank 0's threads ---------------------------------------------------------------------------------

    def receive(self, within_s: float | None = None) -> list[ResponseList]:
        """Block until a decision or a wake-up arrives, for at most ``within_s`` seconds.

        Raises CollectiveFailed after `abort`, but first returns the decisions made before it, because other ranks have
        received them.
        """
        try:
            received = [self.own.get(timeout=within_s), *self._waiting()]
        except queue.Empty:
            return []
        decisions = [each for each in received if isinstance(each, ResponseList)]
        if None in received:
            # The other ranks have received these decisions, so this rank must return them as well.
            with self._deciding:
                rest = self._waiting()
            self.own.put(None)  # Put the end marker back, for the next caller.
            decisions += [each for each in rest if isinstance(each, ResponseList)]
            if not decisions:
                raise CollectiveFailed("aborted", aborted=True)
        return decisions

    def _waiting(self) -> list[ResponseList | str | None]:
        found = []
        while not self.own.empty():
            found.append(self.own.get())
        return found

    def wake(self) -> None:
        self.own.put("wake")

    def abort(self) -> None:
        """Wake the thread that waits for a decision, and the server thread. This method never blocks."""
        self._server.abort()
        self.own.put(None)

    def close(self) -> None:
        self.abort()
        self._server.close(2 * LOOK_S)
