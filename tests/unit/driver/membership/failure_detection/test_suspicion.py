"""Idle, busy or excused: what two probes of a process show about a worker that others wait for."""

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
from elastic.driver.reasons import ReasonKind, because
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
        """Probe five seconds later.

        Since the last probe it used ``cpu`` of a processor and moved ``io`` bytes per second.
        """
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


def test_single_probe_gives_no_verdict():
    look = Look()
    assert look.probe(0.0) is Next.NOTHING
    assert look.it.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("cpu", "io", "verdict"),
    [
        (0.0, 0.0, Verdict.IDLE),
        (0.09, 0.0, Verdict.IDLE),  # one or two polling threads
        (0.11, 0.0, Verdict.BUSY),
        (16.0, 0.0, Verdict.BUSY),
        (0.0, 60 * 1024, Verdict.IDLE),
        (0.0, 65 * 1024, Verdict.BUSY),  # it reads its data
    ],
)
def test_busy_means_a_tenth_of_a_processor_or_64_kib_per_second(cpu, io, verdict):
    look = Look()
    look.probe(cpu, io)
    look.probe(cpu, io)
    assert look.it.verdict is verdict


def test_worker_waiting_for_a_disk_is_busy():
    look = Look()
    look.probe(0.0)
    look.probe(0.0, state="D")
    assert look.it.verdict is Verdict.BUSY


def test_decreasing_counters_belong_to_an_exited_child():
    look = Look()
    look.probe(0.0)
    look.probe(-3.0)
    assert look.it.verdict is Verdict.BUSY


def test_idle_worker_is_named_and_condemned_after_30_seconds():
    look = Look()
    assert look.probe(0.0) is Next.NOTHING
    assert look.probe(0.0) is Next.NAME  # 10 s
    recorded("messages", look.words)
    assert look.probe(0.0) is Next.NOTHING
    assert look.probe(0.0) is Next.NAME  # 20 s: the interval doubled
    assert look.probe(0.0) is Next.NOTHING
    assert look.probe(0.0) is Next.CONDEMN  # 30 s
    assert look.it.reason(look.now, "in 'loss'") == because(
        ReasonKind.IDLE, for_s=30.0, where="in 'loss'"
    )
    assert look.all.next_fence() == 30.5
    assert look.all.to_fence(30.4) == []
    assert look.all.to_fence(30.5) == [look.it]
    assert look.all.next_fence() is None


def test_idle_worker_that_works_again_gets_the_full_limit():
    look = Look()
    for _ in range(4):
        look.probe(0.0)
    look.probe(1.0)  # 25 s
    idle = [look.probe(0.0) for _ in range(5)]
    assert Next.CONDEMN not in idle  # 50 s; idle for 25 s
    assert look.probe(0.0) is Next.CONDEMN


def test_busy_worker_is_named_after_a_minute_and_condemned_after_ten():
    look = Look()
    heard = {}
    while (answer := look.probe(0.98)) is not Next.CONDEMN:
        if answer is Next.NAME:
            heard[look.now] = look.words
    assert list(heard) == [60.0, 120.0, 240.0, 480.0]
    recorded("messages", heard[60.0])
    assert look.now == 600.0
    assert look.it.reason(look.now, "here").kind is ReasonKind.BUSY


def test_condemned_worker_that_becomes_active_is_not_killed():
    look = Look()
    while look.probe(0.0) is not Next.CONDEMN:
        pass
    look.probe(1.0)
    assert look.all.next_fence() is None


@pytest.mark.parametrize(
    ("traced", "state"), [(True, "S"), (False, "t")], ids=["attached", "at a breakpoint"]
)
def test_traced_worker_is_only_named(traced, state):
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
def test_limit_0_never_condemns(changed, cpu):
    look = Look(**changed)
    for _ in range(1000):
        assert look.probe(cpu) is not Next.CONDEMN


def test_busy_warning_of_0_is_off():
    look = Look(busy_warning_s=0.0)
    while (answer := look.probe(1.0)) is not Next.CONDEMN:
        assert answer is Next.NOTHING


def test_cleared_suspect_is_forgotten():
    look = Look()
    look.probe(0.0)
    assert look.all.only([]) == [] and not look.all
    [again] = look.all.only([Suspicion(SLOW, 9.0)])
    assert again is not look.it


def test_waits_restart_when_the_waiting_workers_progress():
    look = Look()
    look.probe(0.0)
    look.probe(0.0)
    look.all.only([Suspicion(SLOW, 8.0)])  # the present waits began at 8 s
    assert look.it.fence_due(look.settings) == 38.0


def test_long_phase_excuses_from_its_beginning():
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
def test_shorter_limits_probe_more_often(changed, every_s):
    assert probe_every_s(settings(**changed)) == pytest.approx(every_s)
