"""Starts the agent of this machine as a child, and every other one by another way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic.driver.launch.starter import Bootstrap, Starter


class StarterFor:
    """``here`` starts on the hosts for which ``elsewhere(host)`` is None, ``there`` on all others.

    ``elsewhere`` may look a name up, so it is called in a thread. It must have a deadline of its own.
    """

    def __init__(
        self, elsewhere: Callable[[str], str | None], *, here: Starter, there: Starter
    ) -> None:
        self._elsewhere = elsewhere
        self._here = here
        self._there = there
        # Of our own: a name server that is out of order must hold up no other use of threads.
        self._lookups = ThreadPoolExecutor(32, thread_name_prefix="host lookup")

    async def start(self, bootstrap: Bootstrap) -> None:
        loop = asyncio.get_running_loop()
        reason = await loop.run_in_executor(self._lookups, self._elsewhere, bootstrap.host)
        await (self._here if reason is None else self._there).start(bootstrap)

    async def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(self._here.close(), self._there.close())
