"""Waits without events: polls a condition, and fails at the deadline with its description."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_S = 0.005
DEADLINE_S = 60.0


def wait_until(true: Callable[[], object], awaited: str, timeout: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout} s for {awaited}"
        time.sleep(LOOK_S)


async def until(true: Callable[[], object], awaited: str, timeout: float = DEADLINE_S) -> None:
    """`wait_until`, while the event loop runs."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout} s for {awaited}"
        await asyncio.sleep(LOOK_S)
