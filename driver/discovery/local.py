"""Leaves out the hosts of another discovery that are not this machine, for a job that has begun on this one alone."""

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
                    self._log("warning", f"host {host} is left out: {reason}, {BEGUN_ALONE}")
            if list(here.items()) != last:
                last = list(here.items())
                yield here


BEGUN_ALONE = (
    "and this job began with this machine alone, where its workers listen on loopback; a job whose"
    " first list has other machines too may use any"
)
