"""Filter that limits another discovery to this machine, for jobs that run only on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from elastic.driver.discovery.interface import Discovery, Log


class LocalDiscovery:
    """Discovery that lists only the hosts of ``source`` that are this machine. Logs each ignored host once."""

    def __init__(self, source: Discovery, elsewhere: Callable[[str], str | None], log: Log) -> None:
        self._source = source
        self._elsewhere = elsewhere
        self._log = log

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        logged = False
        last: list[tuple[str, int]] | None = None
        async for hosts in self._source.watch():
            here: dict[str, int] = {}
            left_out: dict[str, str] = {}
            for host, slots in hosts.items():
                reason = await asyncio.to_thread(self._elsewhere, host)
                if reason is None:
                    here[host] = slots
                else:
                    left_out[host] = reason
            if left_out and not logged:
                logged = True
                host, reason = next(iter(left_out.items()))
                more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else " is"
                self._log("warning", f"ignored host {host}{more} ({host}: {reason}): {BEGUN_ALONE}")
            if list(here.items()) != last:
                last = list(here.items())
                yield here


BEGUN_ALONE = (
    "the workers of this job listen on loopback, so other machines can't join: this machine had "
    "no other address when the job started, or --network-interface selected loopback (logged once)"
)
