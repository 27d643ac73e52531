"""Discovery of hosts as the agents that Spark tasks run. Makes no decisions.

The list contains the hosts of the agents that are connected to the driver, except for executors that Spark is
decommissioning. Workers on those executors leave at the next commit, so that Spark can terminate the executors.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Mapping

from elastic.driver.discovery.interface import Log
from elastic.driver.spark.task_environment import executor_of

LOOK_S = 0.5  # seconds between two checks for decommissioned executors
# Seconds without a new agent after which a job may begin with fewer workers than requested.
SETTLE_S = 2.0
QUIET_S = 5.0  # seconds of waiting for tasks after which the wait is logged


class SparkDiscovery:
    """Discovery that lists the connected agents and their slots, as ``{host: slots}``.

    Args:
        wanted: number of slots that the job needs to begin.
        least: number of slots that is sufficient if no more are expected.
        start_s: seconds to wait for these slots.
        expired: called with the reason if too few slots were connected in time.
        leaving: function that returns which of the given executors are being decommissioned. Called in a thread, so it
            may block.
        log: called with the level and the text of each log line.
    """

    def __init__(
        self,
        *,
        wanted: int,
        least: int,
        start_s: float,
        expired: Callable[[str], None],
        leaving: Callable[[Collection[str]], set[str]],
        log: Log,
    ) -> None:
        self._wanted = wanted
        self._least = least
        self._start_s = start_s
        self._expired = expired
        self._leaving = leaving
        self._log = log
        self._hosts: dict[str, int] = {}
        self._news = asyncio.Event()
        self._left: set[str] = set()  # decommissioned executors

    def connected(self, hosts: Mapping[str, int]) -> None:
        """Replace the slots of the connected agents. Must be called in the event loop's thread."""
        self._hosts = dict(hosts)
        self._news.set()

    async def watch(self) -> AsyncGenerator[dict[str, int], None]:
        if not await self._enough():
            # `expired` has requested the end of the job, which cancels this wait.
            await asyncio.Event().wait()
        over = threading.Event()
        loop = asyncio.get_running_loop()
        # All queries run in one thread, because py4j opens a connection to the JVM for each Python thread.
        thread = threading.Thread(
            target=self._look, args=(loop, over), name="ask spark", daemon=True
        )
        thread.start()
        last: dict[str, int] | None = None
        try:
            while True:
                self._news.clear()
                hosts = self._listed()
                if hosts != last:
                    last = hosts
                    yield dict(hosts)
                await self._news.wait()
        finally:
            over.set()

    async def _enough(self) -> bool:
        """Wait for the slots that the job needs to begin. Return False if the time limit has passed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        logged = False
        while (slots := sum(self._hosts.values())) < self._wanted:
            self._news.clear()
            if not await self._changed(SETTLE_S) and slots >= self._least:
                return True
            waited_s = loop.time() - began
            tasks = f"{slots} of {self._wanted} Spark tasks have started"
            if waited_s >= self._start_s:
                self._expired(
                    f"{tasks} within {self._start_s:g} s, and {self._least} are needed: free or add executors, or"
                    " raise start_timeout"
                )
                return False
            if waited_s >= QUIET_S and not logged:
                logged = True
                self._log("info", f"waiting for Spark: {tasks}")
        return True

    async def _changed(self, within_s: float) -> bool:
        waiting = asyncio.ensure_future(self._news.wait())
        done, _ = await asyncio.wait({waiting}, timeout=within_s)
        waiting.cancel()
        return bool(done)

    def _listed(self) -> dict[str, int]:
        return {
            host: slots
            for host, slots in self._hosts.items()
            if executor_of(host) not in self._left
        }

    def _look(self, loop: asyncio.AbstractEventLoop, over: threading.Event) -> None:
        """Query Spark for decommissioned executors at intervals."""
        last_trouble = ""
        while not over.wait(LOOK_S):
            executors = {executor_of(host) for host in self._hosts}
            try:
                leaving, trouble = self._leaving(executors), ""
            except Exception as error:  # py4j raises exceptions of various types
                leaving, trouble = set(), type(error).__name__
            with contextlib.suppress(RuntimeError):  # The event loop is closed.
                if trouble and trouble != last_trouble:
                    text = f"the list of decommissioned Spark executors can't be read: {trouble}"
                    loop.call_soon_threadsafe(self._log, "warning", text)
                if leaving - self._left:
                    loop.call_soon_threadsafe(self._leave, leaving)
            last_trouble = trouble

    def _leave(self, executors: set[str]) -> None:
        for executor in sorted(executors - self._left):
            self._log("info", f"executor {executor} was decommissioned or lost; its workers leave")
        self._left |= executors
        self._news.set()
