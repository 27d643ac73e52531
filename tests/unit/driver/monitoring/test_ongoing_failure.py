"""Summaries of log lines wait until a failure has unfolded, however far apart its exceptions and exits are."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.driver.events import Action, BreakWorld, EndJob, Event, StartWorker, TimePassed
from elastic.driver.monitoring.debounce_timer import HELD_S, DebounceTimer
from elastic.driver.monitoring.exit_log_lines import ExitLines
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.ongoing_failure import failure_lasts
from elastic.driver.processes.stderr_tail import TracebackLedger
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import Place, Worker
from elastic.protocol.uncaught.sending import Uncaught
from harness.conversation import exited, host_lost

RANKS = 16
WHY = because(ReasonKind.FIRST_START)
BAD = Uncaught("d1", "ValueError: bad", "folded\n", "whole\n", "train.py:3")
LOST = Uncaught("d2", "PeerLost: h:0", "folded\n", "whole\n", "train.py:9", peer=True)


def begun() -> JobView:
    view = JobView()
    starts: list[Action] = [
        StartWorker(Worker("h", slot), Place(slot, RANKS, slot, RANKS, 0, 1), WHY)
        for slot in range(RANKS)
    ]
    view.note(TimePassed(), starts, 0.0)
    return view


@pytest.mark.parametrize(
    ("event", "actions", "lasts"),
    [
        (TimePassed(), [], True),
        (exited("h:3", 1), [], False),
        (host_lost("h"), [], False),
        (exited("h:3", 1), [BreakWorld(1, [], WHY)], True),
        (exited("h:3", 1), [EndJob(1, WHY)], True),
        (exited("h:3", 1), [EndJob(0, WHY)], False),
    ],
)
def test_failure_lasts_while_more_exits_are_expected(
    event: Event, actions: list[Action], lasts: bool
):
    view = begun()
    assert not failure_lasts(view, [])
    view.note(event, actions, 1.0)
    assert failure_lasts(view, [Worker("h", 3)]) is lasts


class FakeLoop:
    """An event loop in which a test passes the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._count = 0
        loop = create_autospec(asyncio.AbstractEventLoop, instance=True)
        loop.time = lambda: self.now
        loop.call_at = self.call_at
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)

    def call_at(self, at: float, call: Callable[[], None]) -> Any:
        self._count += 1
        number = self._count
        heapq.heappush(self._due, (at, number, call))
        handle: asyncio.TimerHandle = create_autospec(asyncio.TimerHandle, instance=True)
        handle.cancel = lambda: self._cancelled.add(number)  # type: ignore[method-assign]
        return handle

    def until(self, at: float) -> None:
        while self._due and self._due[0][0] <= at:
            self.now, number, call = heapq.heappop(self._due)
            if number not in self._cancelled:
                call()
        self.now = at


@pytest.mark.parametrize("apart_s", [0.01, 0.7, 1.1])
@pytest.mark.parametrize("lost", [0, 3])
def test_exceptions_and_exits_seconds_apart_are_summarized_in_one_line_each(
    monkeypatch, apart_s, lost
):
    """Before elastic.run: a worker raises, exits seconds later, and the job ends with the last exit."""
    loop, view, ledger = FakeLoop(monkeypatch), begun(), TracebackLedger()
    sent: set[Worker] = set()
    shown: list[str] = []
    logged: list[str] = []
    timer = DebounceTimer(lambda: shown.extend(ledger.rest()), lambda: failure_lasts(view, sent))
    lines = ExitLines(lambda level, text: logged.append(text), lambda: failure_lasts(view, sent))

    def raised(slot: int) -> None:
        sent.add(Worker("h", slot))
        text = ledger.add(Worker("h", slot), str(slot), LOST if slot < lost else BAD)
        shown.extend([text] if text else [])
        if not text:
            timer.touch()

    def ends(slot: int) -> None:
        event = exited(f"h:{slot}", 1)
        actions: list[Action] = [BreakWorld(1, [], WHY)] if slot == 0 else []
        actions += [EndJob(1, WHY)] if slot == RANKS - 1 else []
        view.note(event, actions, loop.now)
        cools = because(ReasonKind.SLOT_COOLS, worker=f"h:{slot}#1", exit="exit code 1", wait_s=60)
        if not lines.shares("warning", cools):
            logged.append(str(cools))

    happens = [(apart_s * slot, raised, slot) for slot in range(RANKS)]
    happens += [(2.0 + apart_s * slot, ends, slot) for slot in range(RANKS)]
    for at, happen, slot in sorted(happens, key=lambda each: each[0]):
        loop.until(at)
        happen(slot)
    shown += ledger.rest()  # as when the last worker is gone
    lines.flush()
    assert len(shown) == 2 and shown[0] == BAD.folded
    assert len(logged) == 2


def test_summary_is_not_held_forever(monkeypatch):
    loop, fired = FakeLoop(monkeypatch), []
    timer = DebounceTimer(lambda: fired.append(loop.now), lambda: True)
    timer.touch()
    loop.until(3 * HELD_S)
    assert fired == [HELD_S]
    timer.touch()
    loop.until(6 * HELD_S)
    assert fired == [HELD_S, 4 * HELD_S]
