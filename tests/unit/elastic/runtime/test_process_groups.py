"""Drain of a broken group: nothing can write into a tensor any more, whether or not Gloo reports it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

import pytest

pytest.importorskip("torch")

from elastic.collectives.gloo import sockets, thread_activity
from elastic.collectives.gloo.process_group import GlooCollectives
from elastic.rendezvous import worker_settings

RUNLOOP = b"pt_gloo_runloop"
PR_SET_NAME = 15
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")


class Unwoken:
    """A work that lost its wake-up."""

    def is_completed(self) -> bool:
        return False


class Clock:
    """The time of `drain`; only its sleeps let it pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("elastic.collectives.gloo.process_group.time", clock)
    return clock


@pytest.fixture
def group():
    group = GlooCollectives(0, 2, 30.0)
    group._under_way.append(Unwoken())
    return group


def test_missed_wake_up_does_not_delay_the_drain(group, clock):
    assert group.drain(1.0)
    assert clock.now - 100.0 < 0.1


def test_group_with_running_threads_is_not_drained_within_the_limit(group, clock, monkeypatch):
    monkeypatch.setattr(sockets, "count", lambda *_: 1)
    monkeypatch.setattr(thread_activity, "runs", lambda: None)
    assert not group.drain(1.0)
    assert clock.now - 100.0 >= 1.0


def test_sockets_are_cut_before_threads_are_checked_for_activity(group, clock, monkeypatch):
    done: list[str] = []

    def look() -> thread_activity.Runs:
        done.append("look")
        return frozenset()

    monkeypatch.setattr(sockets, "cut", lambda *_: done.append("cut"))
    monkeypatch.setattr(thread_activity, "runs", look)
    assert group.drain(1.0)
    assert done == ["cut", "look", "cut", "look"]


def test_group_is_drained_only_after_two_equal_samples_of_its_threads(group, clock, monkeypatch):
    seen = iter([None, frozenset({("7", b"1/0")}), frozenset({("7", b"2/0")})])
    monkeypatch.setattr(thread_activity, "runs", lambda: next(seen, frozenset({("7", b"2/0")})))
    assert group.drain(1.0)
    # Two looks in a row must be equal, and those are the third and fourth.
    assert clock.now - 100.0 >= 0.08


@linux
def test_working_and_sleeping_threads_are_distinguished():
    working, rest, resting, over = (threading.Event() for _ in range(4))

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, RUNLOOP, 0, 0, 0)
        working.set()
        while not rest.is_set():
            pass
        resting.set()
        over.wait(30)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert working.wait(30)
    before = thread_activity.runs()
    assert before is None or thread_activity.runs() != before  # it runs, or is about to
    rest.set()
    assert resting.wait(30)
    before, now = None, thread_activity.runs()
    for _ in range(1000):
        if now is not None and now == before:
            break
        before, now = now, thread_activity.runs()
    assert now is not None
    assert now == before
    over.set()
    thread.join(30)
    assert thread_activity.runs() != now


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, "0"),
        ({"TORCH_FR_BUFFER_SIZE": "500"}, "500"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}, None),
    ],
    ids=["unasked", "asked for", "asked for by its older name"],
)
def test_torch_records_no_collectives_by_default(given, size):
    environ = dict(given)
    worker_settings.record_nothing(environ)
    assert environ.get("TORCH_FR_BUFFER_SIZE") == size


class Ending:
    """A work in progress whose end the test decides."""

    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over


def test_memory_held_by_a_stuck_work_is_freed_by_a_later_close(clock):
    stuck, backend = Ending(), Freed()
    left = GlooCollectives(0, 2, 30.0)
    left._under_way.append(stuck)
    left._backend, freed = backend, weakref.ref(backend)
    del backend
    left.close()
    GlooCollectives(0, 2, 30.0).close()
    assert freed() is not None
    stuck.over = True
    GlooCollectives(0, 2, 30.0).close()
    assert freed() is None


class Freed:
    """Replacement of Gloo's group."""
