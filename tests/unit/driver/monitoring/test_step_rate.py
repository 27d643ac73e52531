"""Steps and samples per second, as reported by rank 0."""

from __future__ import annotations

import pytest

from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.stalls import Stalls
from elastic.driver.monitoring.step_rate import StepRate
from elastic.protocol.messages import Worker

A, B = Worker("h", 0), Worker("h", 1)


@pytest.fixture
def rate() -> StepRate:
    return StepRate(Stalls(JobView()))


def test_steps_and_samples_are_divided_by_the_time_between_two_reports(rate):
    rate.record(A, 100, 32, 10.0)
    assert rate.steps(10.0) is None
    rate.record(A, 150, 32, 15.0)
    assert rate.steps(15.0) == 10.0
    assert rate.samples(15.0, 4) == 10.0 * 32 * 4


def test_samples_are_unknown_without_a_batch_size(rate):
    rate.record(A, 100, None, 10.0)
    rate.record(A, 150, None, 15.0)
    assert rate.steps(15.0) == 10.0 and rate.samples(15.0, 4) is None


def test_measurement_restarts_with_another_or_restarted_worker(rate):
    for worker, steps in ((A, 100), (B, 900), (B, 3)):
        rate.record(worker, steps, None, 10.0)
        assert rate.steps(10.0) is None
    rate.record(B, 13, None, 15.0)
    assert rate.steps(15.0) == 2.0


def test_worker_without_a_torch_optimizer_reports_no_rate(rate):
    rate.record(A, None, None, 10.0)
    rate.record(A, None, None, 15.0)
    assert rate.steps(15.0) is None


def test_rate_falls_to_0_without_reported_steps(rate):
    rate.record(A, 100, None, 10.0)
    rate.record(A, 150, None, 15.0)
    rate.record(A, 150, None, 20.0)
    assert rate.steps(20.0) == 10.0
    assert rate.steps(60.0) == 0.0


def test_mean_covers_the_reports_of_each_worker(rate):
    assert rate.mean() is None
    for worker, steps, at in ((A, 100, 10.0), (A, 150, 15.0), (B, 3, 20.0), (B, 13, 30.0)):
        rate.record(worker, steps, None, at)
    assert rate.mean() == 60 / 15
