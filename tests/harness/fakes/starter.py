"""A starter without processes, for tests: it records its calls, and fails on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic.driver.launch.starter import Bootstrap, StartFailed


class FakeStarter:
    """Agents run until they are ended, or until this is closed if they don't outlive it."""

    def __init__(self) -> None:
        self.started: list[Bootstrap] = []  # every call
        self.running: dict[str, Bootstrap] = {}
        self.why_not: Callable[[Bootstrap], str] = lambda bootstrap: ""  # unless it gets started
        self._closed = asyncio.Event()

    async def start(self, bootstrap: Bootstrap) -> None:
        self.started.append(bootstrap)
        await asyncio.sleep(0)
        if self._closed.is_set():
            raise StartFailed(f"no agent is started on {bootstrap.host}: the job is ending")
        if reason := self.why_not(bootstrap):
            raise StartFailed(f"the agent on {bootstrap.host} did not start: {reason}")
        self.running[bootstrap.host] = bootstrap

    def end(self, host: str) -> None:
        """The agent's process has ended."""
        del self.running[host]

    async def close(self) -> None:
        self._closed.set()
        self.running = {host: b for host, b in self.running.items() if b.outlives}
