"""Large jobs: that they run, what they cost, and that a regroup costs no more per worker as they grow."""

from __future__ import annotations

import time

import pytest

from elastic.chaos.scale import Scale, regroup


def test_hosts_of_a_large_job_fail_and_come_back():
    outcome = Scale(7, workers=400, virtual_s=120.0).run()
    assert outcome.generation >= 8  # four losses, and the way back of each


def test_a_regroup_costs_no_more_than_linearly():
    small, large = regroup(50), regroup(500)
    assert large.messages <= 10 * small.messages + 100
    assert large.events <= 10 * small.events + 100
    assert large.decide_ms < 10 * small.decide_ms * 3  # loose: it is a measured time


@pytest.mark.slow
def test_ten_thousand_workers_fit_into_a_minute():
    began = time.process_time()
    outcome = Scale(7, workers=10_000, virtual_s=300.0).run()
    assert outcome.virtual_s == 300.0
    assert time.process_time() - began < 60.0  # 34 s on a busy machine
