"""Discovery with a constant list of hosts, from ``-H`` or a hostfile.

With only ``-np``, the list contains this machine with as many slots as needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class StaticDiscovery:
    """Discovery of a constant list of hosts, which is yielded once."""

    def __init__(self, hosts: dict[str, int]) -> None:
        self._hosts = dict(hosts)

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        yield dict(self._hosts)


class OwnSlots:
    """Discovery of this machine alone, for jobs without specified slots.

    The machine has one slot per allowed worker.
    """

    def __init__(self, hosts: dict[str, int]) -> None:
        [(self._host, self.slots)] = hosts.items()
        self._grown = asyncio.Event()
        self._yielded = asyncio.Event()

    async def make_room(self, slots: int) -> None:
        """Increase the number of slots of this machine to ``slots`` if it is smaller.

        Returns after the watcher has received the new list.
        """
        if slots > self.slots:
            self.slots = slots
            self._yielded.clear()
            self._grown.set()
            await self._yielded.wait()

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        """Yield the list with this machine, and again after each change of its number of slots.

        See `Discovery.watch`.
        """
        while True:
            self._grown.clear()
            yield {self._host: self.slots}
            self._yielded.set()
            await self._grown.wait()


# discoveries whose lists do not change without an operator's request
GivenHosts = StaticDiscovery | OwnSlots
