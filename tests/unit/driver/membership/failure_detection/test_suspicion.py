"""Idle, busy or excused: what two looks at a process say about a worker that others wait for."""

from __future__ import annotations

import pytest

from elastic.driver.events import WorkerProbed
from elastic.driver.membership.failure_detection.suspicion import (
    Next,
    Suspicion,
    Suspicions,
    Verdict,
    probe_every_s,
)
from elastic.driver.reasons import Why, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker
from harness.golden import recorded

SLOW = Worker("h", 2)


def settings(**changed: float) -> Settings:
    return Settings(np=4, workers_min=2, workers_max=4, elastic=True, **changed)  # type: ignore[arg-type]


class Look:
    """A suspect that others wait for since 0.0, probed every five seconds."""

    def __init__(self, **changed: float) -> None:
        self.settings = settings(**changed)
        self.all = Suspicions(self.settings)
        [self.it] = self.all.only([Suspicion(SLOW, 0.0)])
        self.now = 0.0
        self.cpu_s, self.io_bytes = 100.0, 10**9

    def probe(self, cpu: float, io: float = 0.0, *, state: str = "S", traced: bool = False) -> Next:
        """Five seconds later; it used so much of a processor meanwhile, and moved so many bytes per second."""
        self.now += 5.0
        self.cpu_s += 5.0 * cpu
        self.io_bytes += int(5.0 * io)
        event = WorkerProbed(SLOW, self.cpu_s, self.io_bytes, state, traced)
        self.it.probed(event, self.now)
        return self.all.judge(self.it, self.now)

    @property
    def words(self) -> str:
        what, end = self.it.describe(self.settings, self.now)
        return f"{what}; {end}" if end else what


def test_one_answer_says_nothing():
    look = Look()
    assert look.probe(0.0) is Next.NOTHING
    assert look.it.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("cpu", "io", "verdict"),
    [
        (0.0, 0.0, Verdict.IDLE),
        (0.09, 0.0, Verdict.IDLE),  # a thread or two that poll
        (0.11, 0.0, Verdict.BUSY),
        (16.0, 0.0, Verdict.BUSY),
        (0.0, 60 * 1024, Verdict.IDLE),
        (0.0, 65 * 1024, Verdict.BUSY),  # it reads its data
    ],
)
def test_busy_is_who_uses_a_tenth_of_a_processor_or_moves_64_kib_a_second(cpu, io, verdict):
    look = Look()
    look.probe(cpu, io)
    look.probe(cpu, io)
    assert look.it.verdict is verdict


def test_who_waits_for_a_disk_is_busy():
    look = Look()
    look.probe(0.0)
    look.probe(0.0, state="D")
    assert look.it.verdict is Verdict.BUSY


def test_figures_that_shrink_are_those_of_a_child_that_is_gone():
    look = Look()
    look.probe(0.0)
    look.probe(-3.0)
    assert look.it.verdict is Verdict.BUSY


def test_idle_is_named_and_condemned_after_30_seconds():
    look = Look()
    assert look.probe(0.0) is Next.NOTHING
    assert look.probe(0.0) is Next.NAME  # 10 s
    recorded("messages", look.words)
    assert look.probe(0.0) is Next.NOTHING
    assert look.probe(0.0) is Next.NAME  # 20 s: twice as long
    assert look.probe(0.0) is Next.NOTHING
    assert look.probe(0.0) is Next.CONDEMN  # 30 s
    assert look.it.reason(look.now, "in 'loss'") == because(Why.IDLE, for_s=30.0, where="in 'loss'")
    assert look.all.next_fence() == 30.5
    assert look.all.to_fence(30.4) == []
    assert look.all.to_fence(30.5) == [look.it]
    assert look.all.next_fence() is None


def test_what_was_idle_and_works_again_has_all_its_time_again():
    look = Look()
    for _ in range(4):
        look.probe(0.0)
    look.probe(1.0)  # 25 s
    idle = [look.probe(0.0) for _ in range(5)]
    assert Next.CONDEMN not in idle  # 50 s; idle since 25 s
    assert look.probe(0.0) is Next.CONDEMN


def test_busy_is_named_after_a_minute_and_condemned_after_ten():
    look = Look()
    heard = {}
    while (answer := look.probe(0.98)) is not Next.CONDEMN:
        if answer is Next.NAME:
            heard[look.now] = look.words
    assert list(heard) == [60.0, 120.0, 240.0, 480.0]
    recorded("messages", heard[60.0])
    assert look.now == 600.0
    assert look.it.reason(look.now, "here").kind is Why.BUSY


def test_who_moves_after_it_was_condemned_is_not_fenced():
    look = Look()
    while look.probe(0.0) is not Next.CONDEMN:
        pass
    look.probe(1.0)
    assert look.all.next_fence() is None


@pytest.mark.parametrize(
    ("traced", "state"), [(True, "S"), (False, "t")], ids=["attached", "at a breakpoint"]
)
def test_under_a_debugger_it_is_only_named(traced, state):
    look = Look()
    heard = []
    for _ in range(1000):
        answer = look.probe(0.0, state=state, traced=traced)
        assert answer is not Next.CONDEMN
        if answer is Next.NAME:
            heard.append(look.now)
    assert heard == [5.0 * 2**n for n in range(10)]
    recorded("messages", look.words)


@pytest.mark.parametrize(("changed", "cpu"), [({"idle_s": 0.0}, 0.0), ({"busy_s": 0.0}, 1.0)])
def test_0_is_never(changed, cpu):
    look = Look(**changed)
    for _ in range(1000):
        assert look.probe(cpu) is not Next.CONDEMN


def test_a_busy_warning_of_0_is_none():
    look = Look(busy_warning_s=0.0)
    while (answer := look.probe(1.0)) is not Next.CONDEMN:
        assert answer is Next.NOTHING


def test_who_is_no_suspect_any_more_is_forgotten():
    look = Look()
    look.probe(0.0)
    assert look.all.only([]) == [] and not look.all
    [again] = look.all.only([Suspicion(SLOW, 9.0)])
    assert again is not look.it


def test_when_those_that_waited_got_on_others_wait_only_since_then():
    look = Look()
    look.probe(0.0)
    look.probe(0.0)
    look.all.only([Suspicion(SLOW, 8.0)])  # whoever waits now began at 8 s
    assert look.it.fence_due(look.settings) == 38.0


def test_a_phase_marked_as_long_excuses_from_when_it_begins():
    look = Look()
    look.probe(0.0)
    [it] = look.all.only([Suspicion(SLOW, 0.0, phase="validation")])
    assert look.all.judge(it, 500.0) is Next.NAME
    what, end = it.describe(look.settings, 500.0)
    assert not end
    recorded("messages", what)


@pytest.mark.parametrize(
    ("changed", "every_s"),
    [
        ({}, 5.0),
        ({"idle_s": 3.0}, 0.5),
        ({"busy_s": 1.2}, 0.2),
        ({"idle_s": 0.0, "busy_s": 0.0}, 5.0),
        ({"idle_s": 0.01}, 0.1),
    ],
)
def test_the_shorter_the_patience_the_sooner_the_look(changed, every_s):
    assert probe_every_s(settings(**changed)) == pytest.approx(every_s)
