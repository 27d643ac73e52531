"""A discovery that a test controls: it yields pushed values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class FakeDiscovery:
    """Yields the given lists, then pushed ones, until it is closed. Repeated lists are left out."""

    def __init__(self, *lists: dict[str, int]) -> None:
        self._queue: asyncio.Queue[dict[str, int] | None] = asyncio.Queue()
        for hosts in lists:
            self.push(hosts)

    def push(self, hosts: dict[str, int]) -> None:
        self._queue.put_nowait(dict(hosts))

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        last: dict[str, int] | None = None
        while (hosts := await self._queue.get()) is not None:
            if hosts != last:
                last = hosts
                yield dict(hosts)
