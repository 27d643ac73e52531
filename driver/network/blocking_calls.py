"""Blocking calls outside the event loop, and waits with a deadline. Makes no decisions.

The calls run in daemon threads, because a hanging call in the event loop's thread pool would block the exit of the
process.
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
    """Run a blocking function in a thread. Return its result, or raise its exception.

    Raises:
        asyncio.TimeoutError: the function has not returned within ``within_s`` seconds. It keeps running, but its
            result is ignored.
    """
    future = begun(lambda: function(*args), "outside the loop")
    await within(over(future), within_s)
    return future.result()


async def within(awaited: Awaitable[T], limit_s: float | None) -> T:
    """Await an awaitable with a time limit. Return its result, or raise its exception.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation if the result arrives in the same iteration of the event
    loop, and the canceller waits forever. This function does not. It returns a result that arrives at the deadline, but
    drops a result that arrives together with a cancellation. A result that must be closed therefore needs another
    owner.

    Raises:
        asyncio.TimeoutError: no result within ``limit_s`` seconds. Raised after ``awaited`` has been cancelled and has
            ended.
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
    """Cancel a future and wait until it is done, so that its resources are released before the caller continues."""
    future.cancel()
    await asyncio.wait({future})


def _noticed(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class SequentialCalls:
    """Executor that runs blocking calls one at a time.

    A call that exceeds its time limit keeps running, and later calls wait until it returns.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # name of the threads in which the calls run
        self._last: Future[Any] | None = None

    async def __call__(self, call: Callable[[], T], within_s: float) -> T:
        """Run a call in a thread. Return its result, or raise its exception.

        Raises:
            asyncio.TimeoutError: the call has not returned within ``within_s`` seconds.
        """
        return await within(self._in_turn(call), within_s)

    async def _in_turn(self, call: Callable[[], T]) -> T:
        while self._last is not None and not self._last.done():
            await over(self._last)
        self._last = future = begun(call, self._name)
        await over(future)
        return future.result()


def begun(call: Callable[[], T], name: str) -> Future[T]:
    """Start a call in a daemon thread with this name, and return a future for its result."""
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
    """Wait until a future is done. Cancelling this wait does not cancel the future."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def notify(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # The event loop has been closed.
            loop.call_soon_threadsafe(over.set)

    future.add_done_callback(notify)
    await over.wait()
