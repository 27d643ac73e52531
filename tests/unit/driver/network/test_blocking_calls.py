"""Waits with a deadline: what comes first counts, and a cancellation counts always."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from elastic.driver.network.blocking_calls import within

LONG_S = 20.0  # never waited for


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def talk(conversation: Callable[[], Awaitable[Any]]) -> list[dict[str, Any]]:
    """What nobody took notice of meanwhile, as the event loop tells it."""
    told: list[dict[str, Any]] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        await asyncio.wait_for(conversation(), LONG_S)

    asyncio.run(whole())
    return told


class Held:
    """Something that whoever was stopped has to give back. It does so a few turns later."""

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


# ---- what comes first -----------------------------------------------------------------------------------------------


def test_a_result_and_an_error_are_passed_on():
    async def conversation() -> None:
        held = Held()
        held.go_on.set()
        assert await within(held.use(), LONG_S) == "used"
        assert await within(held.use(), None) == "used"
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        answer.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await within(answer, LONG_S)

    assert talk(conversation) == []


def test_what_is_late_has_ended_when_that_is_said():
    async def conversation() -> None:
        held = Held()
        with pytest.raises(asyncio.TimeoutError):
            await within(held.use(), 0.0)
        assert not held.open
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(answer, 0.0)
        assert answer.cancelled()

    assert talk(conversation) == []


def test_a_result_that_is_there_at_the_deadline_is_not_lost():
    async def conversation() -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        answer.set_result(7)
        assert await within(answer, 0.0) == 7
        assert await within(Held(ends_with="result").use(), 0.0) == "used after all"
        with pytest.raises(ValueError, match="it could not end"):
            await within(Held(ends_with="it could not end").use(), 0.0)

    assert talk(conversation) == []


# ---- cancellations --------------------------------------------------------------------------------------------------


def test_a_cancellation_that_comes_with_the_result_is_not_forgotten():
    async def conversation() -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(answer, LONG_S))
        await turns(2)
        answer.set_result(7)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    assert talk(conversation) == []


@pytest.mark.parametrize("turn", range(6))
def test_who_is_dismissed_looks_no_further_in_whatever_turn_the_answer_comes(turn):
    async def conversation() -> None:
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

    assert talk(conversation) == []


def test_a_cancellation_and_the_deadline_in_one_turn_are_a_cancellation():
    async def conversation() -> None:
        held = Held()
        waiting = asyncio.ensure_future(within(held.use(), 0.0))
        while not held.open:
            await turns(1)
        await turns(1)  # it is late, and being ended
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() and not held.open

    assert talk(conversation) == []


@pytest.mark.parametrize("ends_with", ["", "result", "it could not end"])
def test_who_is_cancelled_goes_on_when_what_it_waited_for_has_ended(ends_with):
    async def conversation() -> None:
        held = Held(ends_with=ends_with)
        waiting = asyncio.ensure_future(within(held.use(), LONG_S))
        await turns(2)
        assert held.open
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() and not held.open

    assert talk(conversation) == []


def test_who_is_cancelled_twice_waits_for_nothing_any_more():
    async def conversation() -> None:
        held = Held(ends_with="it could not end")
        waiting = asyncio.ensure_future(within(held.use(), LONG_S))
        await turns(2)
        waiting.cancel()
        await turns(1)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        while held.open:  # its error is then nobody's
            await turns(1)

    assert talk(conversation) == []
