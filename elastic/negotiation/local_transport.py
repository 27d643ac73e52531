"""Rank 0's connection to the coordinator, which runs in the same process. `coordinator` decides."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable

from elastic.errors import CollectiveFailed
from elastic.monitoring import timeline
from elastic.negotiation.coordinator import Coordinator
from elastic.negotiation.messages import RequestList, ResponseList
from elastic.negotiation.pending import row
from elastic.negotiation.transport import BEAT_S, ControllerServer, ControllerSettings
from elastic.rendezvous.environment import COLLECTIVE_TIMEOUT_S, Environment
from elastic.rendezvous.store import StoreListener

SILENT_BEATS = 6


def last_resort_s(env: Environment) -> float:
    """Return how many seconds a collective may wait for a rank; 0: no limit.

    With a driver there is no limit, because the driver detects stuck workers and fences them.
    """
    last_s = env.stall_shutdown_s or max(env.collective_timeout_s, COLLECTIVE_TIMEOUT_S)
    return last_s if env.driver is None else 0.0


def silence_s(env: Environment) -> float:
    """Return how many seconds rank 0 may stay silent; 0: no limit. Stalls are reported before that."""
    last_s = last_resort_s(env)
    return last_s + SILENT_BEATS * BEAT_S if last_s else 0.0


class LocalController:
    """Rank 0's connection to the local coordinator: requests are decided immediately, in the thread that makes them."""

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
        self._coordinator = Coordinator(size, env.cache_capacity)
        self._deciding = threading.Lock()  # also ensures the order of published decisions
        self._warn_s = env.stall_warning_s
        self._end_s = last_resort_s(env)
        self._server = ControllerServer(
            listener,
            rules,
            size=size,
            generation=generation,
            secret=env.secret,
            offered=self._offered,
            left=self._left,
            look=self._look,
            died=died,
        )
        self._server.start()

    def send(self, offer: RequestList) -> None:
        self._offered(0, offer)

    def _offered(self, rank: int, offer: RequestList) -> None:
        with self._deciding:
            if timeline.on:
                for name in self._coordinator.named(offer):
                    timeline.tick(row(name, offer.members), rank)
            for decision in self._coordinator.offer(rank, offer):
                self._server.publish(decision)

    def _left(self, rank: int) -> None:
        with self._deciding:
            for decision in self._coordinator.leave(rank, "left: its connection was closed"):
                self._server.publish(decision)

    def _look(self) -> None:
        if self._warn_s <= 0 and self._end_s <= 0:
            return
        with self._deciding:
            stalled, decisions = self._coordinator.stalled(
                time.monotonic(), self._warn_s, self._end_s
            )
            for decision in decisions:
                self._server.publish(decision)
        for sentence in stalled:
            print(f"elastic: stalled: {sentence}", file=sys.stderr, flush=True)

    def receive(self, within_s: float | None = None) -> list[ResponseList]:
        """Block until a decision or a wake arrives, for at most ``within_s`` seconds.

        Raises CollectiveFailed on `abort`, but first returns earlier decisions: the other ranks have received them
        too, and it may be the reason that this world is over.
        """
        try:
            received = [self._server.own.get(timeout=within_s), *self._waiting()]
        except queue.Empty:
            return []
        decisions = [each for each in received if isinstance(each, ResponseList)]
        if None in received:
            # Decisions that are being sent to the other ranks right now are meant for this rank too.
            with self._deciding:
                rest = self._waiting()
            self._server.own.put(None)  # wakes the next caller too
            decisions += [each for each in rest if isinstance(each, ResponseList)]
            if not decisions:
                raise CollectiveFailed("aborted", aborted=True)
        return decisions

    def _waiting(self) -> list[ResponseList | str | None]:
        found = []
        while not self._server.own.empty():
            found.append(self._server.own.get())
        return found

    def wake(self) -> None:
        self._server.wake()

    def abort(self) -> None:
        self._server.abort()

    def close(self) -> None:
        self._server.close()

    def close_sockets(self) -> None:
        self._server.close_sockets()
