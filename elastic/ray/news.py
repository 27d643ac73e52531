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

    source: str  # another one after the driver was restarted, whose numbers begin anew
    next: int
    items: list[Item]
    lost: int


class News:
    """Make it in the event loop."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.source = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._first = 0  # number of the oldest that is kept
        self._lost_before: deque[tuple[int, int]] = deque()  # up to which number, bytes
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    def out(self, data: bytes) -> None:
        self.put(Item("stdout", data), len(data))

    def err(self, data: bytes) -> None:
        self.put(Item("stderr", data), len(data))

    def put(self, item: Item, size: int) -> None:
        """From any thread."""
        with self._lock:
            self._items.append((item, size))
            self._bytes += size
            while self._bytes > self._limit and len(self._items) > 1:
                _, dropped = self._items.popleft()
                self._bytes -= dropped
                self._first += 1
                self._lost_before.append((self._first, dropped))
            if len(self._lost_before) > 1000:
                self._lost_before.popleft()
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

    async def after(self, source: str, number: int, wait_s: float) -> Told:
        """What came since; waits up to ``wait_s`` for the first of it."""
        if source != self.source:
            number = 0
        told = self._since(number)
        if told.items or self._closed:
            return told
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        try:
            if not self._since(number).items:
                await asyncio.wait({future}, timeout=wait_s)
        finally:
            self._waiting.discard(future)
        return self._since(number)

    def _since(self, number: int) -> Told:
        with self._lock:
            lost = sum(size for at, size in self._lost_before if at > number)
            number = max(number, self._first)
            items: list[Item] = []
            size = 0
            for item, bytes_ in list(self._items)[number - self._first :]:
                if items and size + bytes_ > AT_ONCE_BYTES:
                    break
                items.append(item)
                size += bytes_
            return Told(self.source, number + len(items), items, lost)
