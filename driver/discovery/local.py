"""Leaves out the hosts of another discovery that are not this machine: launching on others is not available yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from elastic.driver.discovery.interface import Discovery, Log


class LocalDiscovery:
    """Yields the hosts of ``source`` for which ``elsewhere(host)`` is None, and reports each of the others once.

    ``elsewhere`` may look a name up, so it is called in a thread. It must have a deadline of its own.
    """

    def __init__(self, source: Discovery, elsewhere: Callable[[str], str | None], log: Log) -> None:
        self._source = source
        self._elsewhere = elsewhere
        self._log = log

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        reported: dict[str, str] = {}
        last: list[tuple[str, int]] | None = None
        async for hosts in self._source.watch():
            here: dict[str, int] = {}
            for host, slots in hosts.items():
                reason = await asyncio.to_thread(self._elsewhere, host)
                if reason is None:
                    here[host] = slots
                elif reported.get(host) != reason:
                    reported[host] = reason
                    self._log("warning", f"host {host} is left out: {reason}, {NOT_AVAILABLE}")
            if list(here.items()) != last:
                last = list(here.items())
                yield here


NOT_AVAILABLE = "and launching on other hosts is not available yet"
