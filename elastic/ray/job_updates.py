"""Buffer of a driver's output and reports, in order, for its followers. When it is full, the oldest items are dropped.

Several threads add items. Each follower fetches items from its own position, in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from typing import Any, NamedTuple

LIMIT_BYTES = 8 << 20  # maximum number of buffered bytes
AT_ONCE_BYTES = 1 << 20


class JobUpdate(NamedTuple):
    """Output item or report.

    ``kind`` is "stdout" or "stderr" with bytes as ``value``, or "report" with a `Report`.
    """

    kind: str
    value: Any


class UpdateBatch(NamedTuple):
    """Items fetched by a follower. Pass ``next`` and ``source`` to the next request.

    Args:
        lost: number of bytes that were dropped before the items.
    """

    # ID of the buffer, which changes when the driver restarts and positions start again at 0
    source: str
    next: int  # position after the last item, in bytes since the start
    items: list[JobUpdate]
    lost: int


class JobUpdates:
    """Buffer of output and reports. Create it in the event loop that reads it."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.source = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._limit = limit_bytes
        self._lock = threading.Lock()
        # items, each with the position of its end in bytes since the start
        self._items: deque[tuple[JobUpdate, int]] = deque()
        self._first = 0  # position of the oldest item in bytes since the start
        self._end = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    def out(self, data: bytes) -> None:
        self.put(JobUpdate("stdout", data), len(data))

    def err(self, data: bytes) -> None:
        self.put(JobUpdate("stderr", data), len(data))

    def put(self, item: JobUpdate, size: int) -> None:
        """Add an item of ``size`` bytes, unless it is empty. Thread-safe."""
        if size == 0:
            return
        with self._lock:
            self._end += size
            self._items.append((item, self._end))
            while self._end - self._first > self._limit and len(self._items) > 1:
                _, self._first = self._items.popleft()
        self._wake()

    def close(self) -> None:
        """Wake waiting followers, because no more items will be added."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def after(self, source: str, begin: int, wait_s: float) -> UpdateBatch:
        """Return the items from position ``begin`` on. This method waits up to ``wait_s`` seconds for the first."""
        if source != self.source:
            begin = 0
        batch = self._since(begin)
        if batch.items or self._closed:
            return batch
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        try:
            if not self._since(begin).items:
                await asyncio.wait({future}, timeout=wait_s)
        finally:
            self._waiting.discard(future)
        return self._since(begin)

    def _since(self, begin: int) -> UpdateBatch:
        with self._lock:
            start = at = max(begin, self._first)
            items: list[JobUpdate] = []
            for item, end in self._items:
                if items and end - start > AT_ONCE_BYTES:
                    break
                if end > start:
                    items.append(item)
                    at = end
            return UpdateBatch(self.source, at, items, lost=start - begin)
