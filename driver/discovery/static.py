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
    """Discovery of this machine only, for jobs that specify neither hosts nor slots.

    The machine has one slot for each worker that the job allows.
    """

    def __init__(self, hosts: dict[str, int]) -> None:
        [(self._host, self.slots)] = hosts.items()
        self._grown = asyncio.Event()
        self._yielded = asyncio.Event()

    async def make_room(self, slots: int) -> None:
        """Increase the number of slots of this machine to at least ``slots``.

        If the number changes, wait until `watch` has yielded the new list.
        """
        if slots > self.slots:
            self.slots = slots
            self._yielded.clear()
            self._grown.set()
            await self._yielded.wait()

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        """Yield a list with only this machine, then again after each change of its number of slots.

        See `Discovery.watch`.
        """
        while True:
            self._grown.clear()
            yield {self._host: self.slots}
            self._yielded.set()
            await self._grown.wait()


# discoveries whose lists change only at an operator's request
GivenHosts = StaticDiscovery | OwnSlots
