"""Makes calls that may block for long, beside the event loop: one at a time, each with a deadline. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallsInTurn:
    """A call that is late goes on, those after it wait for it, and at the end of the process nobody does."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the threads
        self._last: Future[Any] | None = None

    async def __call__(self, call: Callable[[], T], within_s: float) -> T:
        """What the call returns or raises. Raises TimeoutError, asyncio's."""
        return await asyncio.wait_for(self._in_turn(call), within_s)

    async def _in_turn(self, call: Callable[[], T]) -> T:
        while self._last is not None and not self._last.done():
            await _over(self._last)
        future: Future[T] = Future()
        self._last = future
        # A daemon: a call that hangs must not hold up the end of the process, as the loop's own threads would.
        threading.Thread(target=_run, args=(future, call), name=self._name, daemon=True).start()
        await _over(future)
        return future.result()


async def _over(future: Future[Any]) -> None:
    """Waits without a tie to the future: whoever stops waiting changes nothing about it."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(over.set)

    future.add_done_callback(tell)
    await over.wait()


def _run(future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
