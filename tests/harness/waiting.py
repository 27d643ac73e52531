"""Waits without events: polls a condition, and fails at the deadline with its description."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_S = 0.005
DEADLINE_S = 60.0


def wait_until(
    true: Callable[[], object],
    awaited: str,
    timeout: float = DEADLINE_S,
    *,
    look_s: float = LOOK_S,
    state: Callable[[], str] = lambda: "",
) -> float:
    """Return the time on the monotonic clock. ``state()`` is shown at the deadline."""
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {awaited}\n{state()}".rstrip())
        time.sleep(look_s)
    return time.monotonic()


async def until(true: Callable[[], object], awaited: str, timeout: float = DEADLINE_S) -> None:
    """`wait_until`, while the event loop runs."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout} s for {awaited}"
        await asyncio.sleep(LOOK_S)
