"""What a driver has to tell whoever follows it: lines of output and reports, in order, the newest when it is too much.

Reports and lines come from several threads; followers ask from the event loop, each from where it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from typing import Any, NamedTuple

LIMIT_BYTES = 8 << 20  # of what is kept
AT_ONCE_BYTES = 1 << 20


class Item(NamedTuple):
    """``kind`` is stdout or stderr, and ``value`` bytes; or report, and a `Report`."""

    kind: str
    value: Any


class Told(NamedTuple):
    """``next`` and ``source`` are what to ask with the next time. ``lost``: how many bytes had to be dropped."""

    source: str  # another one after the driver was restarted, which begins anew
    next: int  # in bytes since the beginning
    items: list[Item]
    lost: int


class News:
    """Make it in the event loop."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.source = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._limit = limit_bytes
        self._lock = threading.Lock()
        # Each with where it ends, in bytes since the beginning.
        self._items: deque[tuple[Item, int]] = deque()
        self._first = 0  # where the oldest that is kept begins
        self._end = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    def out(self, data: bytes) -> None:
        self.put(Item("stdout", data), len(data))

    def err(self, data: bytes) -> None:
        self.put(Item("stderr", data), len(data))

    def put(self, item: Item, size: int) -> None:
        """From any thread. ``size``: in bytes; nothing is no news."""
        if size == 0:
            return
        with self._lock:
            self._end += size
            self._items.append((item, self._end))
            while self._end - self._first > self._limit and len(self._items) > 1:
                _, self._first = self._items.popleft()
        self._wake()

    def close(self) -> None:
        """Nothing more comes: nobody is kept waiting."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def after(self, source: str, begin: int, wait_s: float) -> Told:
        """What came since; waits up to ``wait_s`` for the first of it."""
        if source != self.source:
            begin = 0
        told = self._since(begin)
        if told.items or self._closed:
            return told
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        try:
            if not self._since(begin).items:
                await asyncio.wait({future}, timeout=wait_s)
        finally:
            self._waiting.discard(future)
        return self._since(begin)

    def _since(self, begin: int) -> Told:
        with self._lock:
            start = at = max(begin, self._first)
            items: list[Item] = []
            for item, end in self._items:
                if items and end - start > AT_ONCE_BYTES:
                    break
                if end > start:
                    items.append(item)
                    at = end
            return Told(self.source, at, items, lost=start - begin)
