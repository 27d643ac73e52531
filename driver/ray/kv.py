"""Ray's key-value store, asked until it answers. Never imports ray: `kv_calls` makes the calls. Decides nothing.

While Ray's head (its GCS) is away, every question waits, as long as it takes; that is said once, and once more when it
is over. Ray sets the bound: the processes of a cluster whose head stays away are ended by Ray, after 60 s unless its
setting ``gcs_rpc_server_reconnect_timeout_s`` says otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from elastic.driver.discovery.interface import Log
from elastic.driver.network.blocking_calls import CallsInTurn
from elastic.driver.ray.cluster import Unanswered

ANSWER_S = 5.0  # for a call that should have given up by itself before
GRACE_S = 3.0  # after so much silence it is told that it does not answer
PAUSE_S = 0.5  # at most, between two questions

T = TypeVar("T")


class KeyValues(Protocol):
    """What is needed of the store. All of it may block, and raises Unanswered where it may have been done or not."""

    def put(self, key: str, value: bytes) -> None:
        """Whatever was there."""

    def create(self, key: str, value: bytes) -> bool:
        """Only where nothing was there; whether that is so."""

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those that are there."""

    def keys(self, prefix: str) -> list[str]: ...

    def remove(self, prefix: str) -> None:
        """All keys that begin so."""


class Insistent:
    """Asks again until there is an answer, one question after the other, outside the event loop."""

    def __init__(
        self,
        kv: KeyValues,
        log: Log,
        *,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kv = kv
        self._log = log
        self._answer_s = answer_s
        self._clock = clock
        self._pause = pause
        self._calls = CallsInTurn("ray key-value store")
        self._failures = 0  # since the last answer
        self._silent_since = 0.0  # where there are failures
        self._told = False

    async def put(self, key: str, value: bytes) -> None:
        await self._ask(lambda: self._kv.put(key, value))

    async def create(self, key: str, value: bytes) -> bool:
        """False may also mean that an earlier try has put it there, whose answer got lost."""
        return await self._ask(lambda: self._kv.create(key, value))

    async def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        return await self._ask(lambda: self._kv.get(keys))

    async def keys(self, prefix: str) -> list[str]:
        return await self._ask(lambda: self._kv.keys(prefix))

    async def remove(self, prefix: str) -> None:
        await self._ask(lambda: self._kv.remove(prefix))

    async def _ask(self, call: Callable[[], T]) -> T:
        while True:
            begun = self._clock()
            try:
                answer = await self._calls(call, self._answer_s)
            except Unanswered as error:
                await self._failed(str(error), begun)
            except asyncio.TimeoutError:
                await self._failed(f"no response within {self._answer_s:g} s", begun)
            else:
                self._answered()
                return answer

    async def _failed(self, why: str, begun: float) -> None:
        if not self._failures:
            self._silent_since = begun
        self._failures += 1
        if not self._told and self._clock() - self._silent_since >= GRACE_S:
            self._told = True
            self._log(
                "warning",
                f"Ray's head does not answer ({why}); training continues, membership changes wait",
            )
        await self._pause(min(PAUSE_S, 0.05 * 2 ** min(self._failures, 5)))

    def _answered(self) -> None:
        if self._told:
            silent_s = self._clock() - self._silent_since
            self._log("info", f"Ray's head answers again, after {silent_s:.1f} s")
        self._failures, self._told = 0, False
