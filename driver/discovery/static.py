"""Constant list of hosts from ``-H`` or a hostfile. With only ``-np``, it contains this machine with as many slots as
needed."""

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
    """Discovery of this machine alone, for jobs without specified slots. The machine has one slot per allowed
    worker.
    """

    def __init__(self, hosts: dict[str, int]) -> None:
        [(self._host, self.slots)] = hosts.items()
        self._grown = asyncio.Event()
        self._yielded = asyncio.Event()

    async def make_room(self, slots: int) -> None:
        """Increase the number of slots to ``slots`` if it is smaller. Returns once the watcher has received the new
        list."""
        if slots > self.slots:
            self.slots = slots
            self._yielded.clear()
            self._grown.set()
            await self._yielded.wait()

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        """See `Discovery.watch`."""
        while True:
            self._grown.clear()
            yield {self._host: self.slots}
            self._yielded.set()
            await self._grown.wait()


GivenHosts = StaticDiscovery | OwnSlots  # their lists do not grow by themselves
