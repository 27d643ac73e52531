"""Which threads receive the signal for stacks, and in which order."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from elastic.driver.processes import proc_stats
from elastic.driver.processes.proc_stats import ThreadStatus
from elastic.driver.processes.thread_stacks import in_order, signal_in_turn, signal_thread

SIGNAL = 38
BIT = 1 << (SIGNAL - 1)


def thread(number: int, state: str = "S", blocked: int = 0) -> ThreadStatus:
    return ThreadStatus(number, "python", state, 0, blocked)


MAIN, TRAINING, BLOCKING = thread(1), thread(2), thread(3, blocked=BIT | 1)
BUSY, WAITING = thread(4, state="R"), thread(5, state="D")
THREADS = [WAITING, MAIN, TRAINING, BLOCKING, BUSY]


def test_order_when_one_thread_is_wanted_then_contains_only_this_thread():
    assert in_order(THREADS, SIGNAL, 2, all_threads=False) == [TRAINING]
    assert in_order(THREADS, SIGNAL, 3, all_threads=False) == []


def test_order_when_all_are_wanted_then_the_first_leads_and_uninterruptible_ones_are_last():
    assert in_order(THREADS, SIGNAL, 2, all_threads=True) == [TRAINING, MAIN, BUSY, WAITING]
    assert in_order(THREADS, SIGNAL, 5, all_threads=True) == [MAIN, TRAINING, BUSY, WAITING]


def test_signal_sent_to_a_thread_is_received_only_by_this_thread():
    number, received = signal.SIGRTMIN + 9, threading.Event()
    blocked, waiting = threading.Event(), threading.Event()

    def receive() -> None:
        blocked.set()
        waiting.set() if signal.sigtimedwait({number}, 30.0) is not None else None
        received.set()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})  # new threads inherit it
    try:
        receiver = threading.Thread(target=receive)
        receiver.start()
        assert blocked.wait(30.0)
        assert receiver.native_id is not None
        signal_thread(os.getpid(), receiver.native_id, number)
        assert received.wait(30.0) and waiting.is_set()
        receiver.join()
        assert signal.sigpending() & {number} == set()
        with pytest.raises(ProcessLookupError):
            signal_thread(os.getpid(), 2**22 + 1, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def test_signals_when_a_thread_does_not_respond_then_later_threads_are_not_signalled(
    monkeypatch,
):
    monkeypatch.setattr("elastic.driver.processes.thread_stacks.STACKS_S", 0.0)
    sent: list[int] = []
    monkeypatch.setattr(
        "elastic.driver.processes.thread_stacks.signal_thread",
        lambda pid, thread, number: sent.append(thread),
    )
    announced: list[ThreadStatus] = []
    late = await signal_in_turn(1, [MAIN, TRAINING, BUSY], SIGNAL, announced.append)
    assert (late, sent, announced) == (3, [1], [MAIN])


async def test_signals_when_handlers_return_then_threads_are_signalled_in_turn(monkeypatch):
    """A handler is running while the signal is pending or blocked. A thread may end meanwhile."""
    looks: dict[int, list[ThreadStatus | None]] = {
        1: [thread(1, blocked=BIT), ThreadStatus(1, "python", "R", BIT, 0), MAIN, MAIN],
        2: [None, None],
        4: [thread(4), thread(4, blocked=BIT), BUSY, BUSY],
    }
    monkeypatch.setattr(proc_stats, "thread_of", lambda pid, thread: looks[thread].pop(0))
    sent: list[int] = []

    def send(pid: int, thread: int, number: int) -> None:
        assert all(not looks[each] for each in sent), "the previous one has finished"
        if thread == 5:
            raise ProcessLookupError
        sent.append(thread)

    monkeypatch.setattr("elastic.driver.processes.thread_stacks.signal_thread", send)
    monkeypatch.setattr("elastic.driver.processes.thread_stacks.LOOK_S", 0.0)
    threads = [MAIN, TRAINING, WAITING, BUSY]
    assert await signal_in_turn(1, threads, SIGNAL, lambda thread: None) == 0
    assert sent == [1, 2, 4]
