"""Timer that fires after a period without events. It is used to combine related log lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

QUIET_S = 1.0
MOST_S = 5.0  # maximum delay after the first event, in seconds, regardless of later events
HELD_S = 20.0  # maximum delay while ``held()`` is True, in seconds


class DebounceTimer:
    """Timer that calls ``then`` in the event loop's thread QUIET_S seconds after the last `touch`.

    While ``held()`` is True, it fires only HELD_S seconds after the first `touch`.
    """

    def __init__(self, then: Callable[[], None], held: Callable[[], bool] = lambda: False) -> None:
        self._then = then
        self._held = held
        self._handle: asyncio.TimerHandle | None = None
        self._latest = 0.0  # time at which the timer fires at the latest, unless ``held()`` is True
        self._held_to = 0.0

    def touch(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._handle is None:
            self._latest, self._held_to = now + MOST_S, now + HELD_S
        else:
            self._handle.cancel()
        self._handle = loop.call_at(min(now + QUIET_S, self._latest), self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        loop = asyncio.get_running_loop()
        if self._held() and (now := loop.time()) < self._held_to:
            self._latest = self._held_to
            self._handle = loop.call_at(min(now + QUIET_S, self._held_to), self._fire)
            return
        self._handle = None
        self._then()
