"""Waits with a time limit: the first result counts, and a cancellation always does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.driver.network.blocking_calls import within
from harness.golden import raises, recorded

LONG_S = 20.0  # never waited in full


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if an event loop reports an unhandled error or a pending task."""
    unhandled: list[dict[str, Any]] = []
    handler = lambda loop, context: unhandled.append(context)  # noqa: E731
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", handler)
    yield
    assert unhandled == []


class Held:
    """A resource that a cancelled task must release, which takes a few turns of the loop."""

    def __init__(self, *, ends_with: str = "") -> None:
        self.open = False
        self.go_on = asyncio.Event()
        self._ends_with = ends_with

    async def use(self) -> str:
        self.open = True
        try:
            await self.go_on.wait()
            return "used"
        except asyncio.CancelledError:
            await turns(3)
            if self._ends_with == "result":
                return "used after all"
            if self._ends_with:
                raise ValueError(self._ends_with) from None
            raise
        finally:
            self.open = False


# ---- first result ---------------------------------------------------------------------------------------------------


async def test_result_and_error_are_passed_on():
    held = Held()
    held.go_on.set()
    assert await within(held.use(), LONG_S) == "used"
    assert await within(held.use(), None) == "used"
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await within(answer, LONG_S)


async def test_late_task_has_ended_when_the_timeout_is_raised():
    held = Held()
    with pytest.raises(asyncio.TimeoutError):
        await within(held.use(), 0.0)
    assert not held.open
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.raises(asyncio.TimeoutError):
        await within(answer, 0.0)
    assert answer.cancelled()


async def test_result_available_at_the_deadline_is_not_lost():
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_result(7)
    assert await within(answer, 0.0) == 7
    recorded("messages", await within(Held(ends_with="result").use(), 0.0))
    with raises(ValueError):
        await within(Held(ends_with="it could not end").use(), 0.0)


# ---- cancellations --------------------------------------------------------------------------------------------------


async def test_cancellation_that_arrives_with_the_result_is_kept():
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(answer, LONG_S))
    await turns(2)
    answer.set_result(7)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


@pytest.mark.parametrize("turn", range(6))
async def test_cancelled_task_stops_regardless_of_the_turn_of_its_answer(turn):
    found = asyncio.Event()
    looks = []

    async def look() -> None:
        await found.wait()
        found.clear()
        looks.append(1)

    async def for_ever() -> None:
        while True:
            await within(look(), LONG_S)

    looking = asyncio.ensure_future(for_ever())
    await turns(3)
    found.set()
    await turns(turn)
    looking.cancel()
    await turns(10)
    assert looking.cancelled()


async def test_cancellation_and_deadline_in_one_turn_are_a_cancellation():
    held = Held()
    waiting = asyncio.ensure_future(within(held.use(), 0.0))
    while not held.open:
        await turns(1)
    await turns(1)  # the time limit has passed, and the task is being cancelled
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() and not held.open


@pytest.mark.parametrize("ends_with", ["", "result", "it could not end"])
async def test_cancelled_task_continues_when_its_awaited_task_has_ended(ends_with):
    held = Held(ends_with=ends_with)
    waiting = asyncio.ensure_future(within(held.use(), LONG_S))
    await turns(2)
    assert held.open
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() and not held.open


async def test_task_cancelled_twice_no_longer_waits():
    held = Held(ends_with="it could not end")
    waiting = asyncio.ensure_future(within(held.use(), LONG_S))
    await turns(2)
    waiting.cancel()
    await turns(1)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    while held.open:  # its error is then not handled anywhere
        await turns(1)
