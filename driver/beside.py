"""Calls that may block for ever, made beside the event loop, each with a deadline. Decides nothing.

Their threads are daemons: a call that hangs must not hold up the end of the process, as the loop's own threads would.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, within_s: float | None) -> T:
    """What it returns or raises. Raises asyncio.TimeoutError; then it goes on, and nobody waits for it."""
    future = begun(lambda: function(*args), "beside the loop")
    await within(asyncio.ensure_future(_over(future)), within_s)
    return future.result()


async def within(future: asyncio.Future[T], limit_s: float | None) -> T:
    """As `asyncio.wait_for`, which before Python 3.12 forgets that it was cancelled where the future is just done."""
    try:
        done, _ = await asyncio.wait({future}, timeout=limit_s)
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise asyncio.TimeoutError
    return future.result()


class CallsInTurn:
    """One at a time: a call that is late goes on, and those after it wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the threads
        self._last: Future[Any] | None = None

    async def __call__(self, call: Callable[[], T], within_s: float) -> T:
        """What the call returns or raises. Raises asyncio.TimeoutError."""
        return await within(asyncio.ensure_future(self._in_turn(call)), within_s)

    async def _in_turn(self, call: Callable[[], T]) -> T:
        while self._last is not None and not self._last.done():
            await _over(self._last)
        self._last = future = begun(call, self._name)
        await _over(future)
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


async def _over(future: Future[Any]) -> None:
    """Waits without a tie to the future: whoever stops waiting changes nothing about it."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(over.set)

    future.add_done_callback(tell)
    await over.wait()
