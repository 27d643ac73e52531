"""A list that never changes: ``-H`` or a hostfile. With plain ``-np`` this machine, with as many slots as it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class StaticDiscovery:
    """Yields its list once."""

    def __init__(self, hosts: dict[str, int]) -> None:
        self._hosts = dict(hosts)

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        yield dict(self._hosts)


class OwnSlots:
    """This machine alone, where nobody has said how many slots it has: as many as the job may have workers."""

    def __init__(self, hosts: dict[str, int]) -> None:
        [(self._host, self.slots)] = hosts.items()
        self._grown = asyncio.Event()
        self._told = asyncio.Event()

    async def make_room(self, slots: int) -> None:
        """It has so many from here on, if they are more. Returns when whoever watches has been told."""
        if slots > self.slots:
            self.slots = slots
            self._told.clear()
            self._grown.set()
            await self._told.wait()

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        """See `Discovery.watch`."""
        while True:
            self._grown.clear()
            yield {self._host: self.slots}
            self._told.set()
            await self._grown.wait()
