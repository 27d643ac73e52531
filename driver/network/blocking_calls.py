"""Waits with a deadline, and calls that may block for ever, made outside the event loop. Decides nothing.

Threads of calls are daemons: a call that hangs must not hold up the end of the process, as the loop's own would.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def to_thread(function: Callable[..., T], *args: Any, within_s: float | None) -> T:
    """What it returns or raises. Raises asyncio.TimeoutError; then it goes on, and nobody waits for it."""
    future = begun(lambda: function(*args), "outside the loop")
    await within(over(future), within_s)
    return future.result()


async def within(awaited: Awaitable[T], limit_s: float | None) -> T:
    """What it returns or raises. Raises asyncio.TimeoutError; it has been cancelled then, and has ended.

    `asyncio.wait_for` forgets, before Python 3.12, that it was cancelled where the result comes in the same turn of
    the loop: whoever cancelled it waits for ever. A result that comes with the deadline is returned all the same. One
    that comes with a cancellation is dropped: what has to be closed must be in other hands by then.
    """
    future = asyncio.ensure_future(awaited)
    try:
        in_time, _ = await asyncio.wait({future}, timeout=limit_s)
        if not in_time:
            await _stopped(future)
    except asyncio.CancelledError:
        future.add_done_callback(_noticed)
        await _stopped(future)
        raise
    if not in_time and future.cancelled():
        raise asyncio.TimeoutError
    return future.result()


async def _stopped(future: asyncio.Future[Any]) -> None:
    """What it holds is released before whoever waited for it goes on."""
    future.cancel()
    await asyncio.wait({future})


def _noticed(future: asyncio.Future[Any]) -> None:
    """Its error, if there is one, has nobody left whom it concerns."""
    if not future.cancelled():
        future.exception()


class CallsInTurn:
    """One at a time: a call that is late goes on, and those after it wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the threads
        self._last: Future[Any] | None = None

    async def __call__(self, call: Callable[[], T], within_s: float) -> T:
        """What the call returns or raises. Raises asyncio.TimeoutError."""
        return await within(self._in_turn(call), within_s)

    async def _in_turn(self, call: Callable[[], T]) -> T:
        while self._last is not None and not self._last.done():
            await over(self._last)
        self._last = future = begun(call, self._name)
        await over(future)
        return future.result()


def begun(call: Callable[[], T], name: str) -> Future[T]:
    """In a thread of this name."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def over(future: Future[Any]) -> None:
    """Waits without a tie to the future: whoever stops waiting changes nothing about it."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(over.set)

    future.add_done_callback(tell)
    await over.wait()
