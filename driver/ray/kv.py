"""Access to Ray's key-value store with retries. Never imports ray: `kv_calls` makes the calls. Makes no decisions.

While Ray's head process (its GCS) is unavailable, each call waits without a time limit. The outage and its end are
logged once. Ray itself limits the wait: if the head process does not return, it ends all processes of the cluster,
after 60 s by default (``gcs_rpc_server_reconnect_timeout_s``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from elastic.driver.discovery.interface import Log
from elastic.driver.network.blocking_calls import SequentialCalls
from elastic.driver.ray.cluster import RayUnavailable

ANSWER_S = 5.0  # time limit, in seconds, for a call whose own timeout did not take effect
GRACE_S = 3.0  # seconds without a response after which the outage is logged
PAUSE_S = 0.5  # maximum interval between two attempts, in seconds

T = TypeVar("T")


class KVStore(Protocol):
    """Interface for operations on the key-value store.

    All operations may block. They raise RayUnavailable if it is unknown whether the operation was performed.
    """

    def put(self, key: str, value: bytes) -> None:
        """Write a value, or replace an existing one."""

    def create(self, key: str, value: bytes) -> bool:
        """Write a value if the key does not exist. Return whether the value was written."""

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist."""

    def keys(self, prefix: str) -> list[str]: ...

    def remove(self, prefix: str) -> None:
        """Remove all keys with this prefix."""


class RetryingKV:
    """Client of Ray's key-value store that repeats each operation until Ray responds.

    Operations run sequentially in a thread, outside the event loop.
    """

    def __init__(
        self,
        kv: KVStore,
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
        self._calls = SequentialCalls("ray key-value store")
        self._failures = 0  # number of failed attempts since the last answer
        self._silent_since = 0.0  # time of the first of these failures
        self._logged = False

    async def put(self, key: str, value: bytes) -> None:
        await self._ask(lambda: self._kv.put(key, value))

    async def create(self, key: str, value: bytes) -> bool:
        """Write a value if the key does not exist. Return whether the value was written.

        False can also mean that an earlier attempt wrote the value but its answer was lost.
        """
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
            except RayUnavailable as error:
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
        if not self._logged and self._clock() - self._silent_since >= GRACE_S:
            self._logged = True
            self._log(
                "warning",
                f"Ray's head does not respond ({why}); training continues, and membership changes are postponed",
            )
        await self._pause(min(PAUSE_S, 0.05 * 2 ** min(self._failures, 5)))

    def _answered(self) -> None:
        if self._logged:
            silent_s = self._clock() - self._silent_since
            self._log("info", f"Ray's head responds again after {silent_s:.1f} s")
        self._failures, self._logged = 0, False
