"""Starter that delegates to one of two other starters, for agents on this machine and on other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic.driver.launch.starter import Bootstrap, Starter


class StarterByHost:
    """Starter that uses ``here`` for the names of this machine, and ``there`` for all other hosts.

    Args:
        elsewhere: called with a host. Returns None if the host is this machine, otherwise the evidence that it is not.
            May resolve names, so it is called in a separate thread and must have its own timeout.
    """

    def __init__(
        self, elsewhere: Callable[[str], str | None], *, here: Starter, there: Starter
    ) -> None:
        self._elsewhere = elsewhere
        self._here = here
        self._there = there
        # A separate thread pool, so that an unresponsive name server does not block other tasks.
        self._lookups = ThreadPoolExecutor(32, thread_name_prefix="host lookup")

    async def start(self, bootstrap: Bootstrap) -> None:
        loop = asyncio.get_running_loop()
        reason = await loop.run_in_executor(self._lookups, self._elsewhere, bootstrap.host)
        await (self._here if reason is None else self._there).start(bootstrap)

    async def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(self._here.close(), self._there.close())
