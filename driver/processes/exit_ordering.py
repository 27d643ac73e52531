"""Delivery of a worker's exit event after all its messages. Makes no decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from elastic.driver.events import WorkerExited
from elastic.protocol.messages import Worker

# Seconds to wait for the messages of a worker that exited with code 0. They may include a large result.
PARTING_S = 2.0


class Connections(Protocol):
    """Interface to the connections of workers that `ExitBarrier` uses."""

    def drain(self, worker: Worker) -> None: ...
    def connected(self, worker: Worker) -> bool: ...
    def disconnect(self, worker: Worker) -> None: ...


class ExitBarrier:
    """Barrier that delays a worker's exit event until all messages of the worker have been handled."""

    def __init__(self, connections: Connections, exited: Callable[[WorkerExited], None]) -> None:
        self._connections = connections
        self._exited = exited
        self._parting: dict[Worker, WorkerExited] = {}

    def gone(self, event: WorkerExited) -> None:
        """Handle the exit of a worker's process."""
        self._connections.drain(event.worker)
        self._parting[event.worker] = event
        if event.code == 0 and self._connections.connected(event.worker):
            asyncio.get_running_loop().call_later(PARTING_S, self._part, event.worker)
        else:
            self._part(event.worker)

    def disconnected(self, worker: Worker) -> None:
        """Handle the end of a worker's connection, after which no more messages of the worker can arrive."""
        self._part(worker)

    def _part(self, worker: Worker) -> None:
        event = self._parting.pop(worker, None)
        if event is not None:
            self._connections.disconnect(worker)
            self._exited(event)
