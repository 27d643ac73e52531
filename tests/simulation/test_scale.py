"""Large jobs: that they run, what they cost, and that a regroup costs no more per worker as they grow."""

from __future__ import annotations

import sys
import time
from types import FrameType

import pytest

from elastic.chaos.simulator.regroup_cost import Cost, Scale, regroup
from elastic.chaos.simulator.simulator import Simulation, Violation
from harness.golden import raises


@pytest.mark.nightly
def test_hosts_of_a_large_job_fail_and_return():
    outcome = Scale(7, workers=400, virtual_s=120.0).run()
    assert outcome.generation >= 8  # four losses, and the way back of each


def test_first_start_may_finish_after_the_simulated_time():
    outcome = Scale(7, workers=200, virtual_s=1.0, host_failures=0).run()
    assert 1.0 < outcome.virtual_s < 30.0


@pytest.mark.parametrize("before_s", [pytest.param(0.5, marks=pytest.mark.slow), 2.5])
def test_regroup_may_finish_after_the_simulated_time(before_s):
    """A host was lost so shortly before: nobody has noticed yet, or the others are regrouping."""
    scale = Scale(7, workers=200, virtual_s=60.0, host_failures=0)
    scale.simulation.clock.at(60.0 - before_s, scale._lose_a_host)
    outcome = scale.run()
    assert 60.0 < outcome.virtual_s < 120.0
    # The first two, one without the host, and one with it again: or two, where its workers come apart.
    assert outcome.generation in (4, 5)


@pytest.mark.slow
def test_job_that_does_not_reform_its_world_is_a_violation(monkeypatch):
    monkeypatch.setattr(Simulation, "calm", lambda self: None)
    scale = Scale(7, workers=200, virtual_s=60.0, host_failures=0)
    scale.simulation.clock.at(58.0, scale._lose_a_host)
    monkeypatch.setattr(scale, "_back", lambda host: None)
    with raises(Violation):
        scale.run()


@pytest.mark.slow
def test_cost_of_a_regroup_grows_at_most_linearly():
    (small, called), (large, called_large) = counted(50), counted(250)
    assert large.messages <= 5 * small.messages + 100
    assert large.events <= 5 * small.events + 100
    assert called_large <= 5 * called * 1.3


def counted(workers: int) -> tuple[Cost, int]:
    """What a regroup cost, and how many functions were called: processor time, as far as it is the same each time."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        cost = regroup(workers)
    finally:
        sys.setprofile(before)
    return cost, calls


@pytest.mark.nightly
@pytest.mark.slow
def test_ten_thousand_workers_fit_into_a_minute():
    began = time.process_time()
    outcome = Scale(7, workers=10_000, virtual_s=300.0).run()
    assert outcome.virtual_s == 300.0
    assert time.process_time() - began < 60.0  # 34 s on a busy machine
