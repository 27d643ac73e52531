"""Schedules of the learning rate when training has another number of steps."""

import pytest
import torch

from elastic.integrations.learning_rate_schedules import (
    ScaledSchedule,
    ScheduleLengthChange,
    counts_steps,
)


def linear(steps):
    return lambda step: 1 - step / steps


def rates(factor, first, last):
    return [factor(step) for step in range(first, last + 1)]


def test_undisturbed_schedule_is_unchanged():
    factor = ScaledSchedule(linear, 100)
    factor.follow(40, 60)
    assert rates(factor, 0, 100) == [linear(100)(step) for step in range(101)]


@pytest.mark.parametrize(("left", "last"), [(120, 160), (30, 70)])
def test_schedule_ends_with_the_last_step_of_a_changed_world(left, last):
    """Without a jump where it changes: a worker is lost, or one joins."""
    factor = ScaledSchedule(linear, 100)
    before = factor(40)
    factor.follow(40, left)
    assert factor(40) == before
    assert factor(last) == pytest.approx(0)
    assert factor(last - 1) == pytest.approx(0.6 / left)
    assert all(each > 0 for each in rates(factor, 40, last - 1))


def test_schedule_follows_several_changes_of_the_number_of_steps():
    factor = ScaledSchedule(linear, 100)
    factor.follow(20, 160)  # one of two is lost
    factor.follow(100, 40)  # and returns
    assert factor(100) == pytest.approx(0.4)
    assert factor(140) == pytest.approx(0)


def test_schedule_of_a_joining_worker_equals_the_schedule_of_its_peers():
    """It was created for another number of steps."""

    def schedule(steps):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        factor = ScaledSchedule(linear, steps)
        return factor, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    (one, scheduler), (another, newcomers) = schedule(100), schedule(200)
    one.follow(10, 180)
    newcomers.load_state_dict(scheduler.state_dict())
    assert rates(another, 10, 190) == rates(one, 10, 190)


def test_a_checkpoint_of_other_worlds_is_resumed_at_its_share_of_training():
    factor = ScaledSchedule(linear, 50)
    factor.resume(60, 0.3)  # 60 of 200 steps, with fewer workers
    factor.follow(60, 35)
    assert factor(60) == pytest.approx(0.7)
    assert factor(95) == pytest.approx(0)


def test_a_schedule_of_the_script_is_reported_once():
    changed = ScheduleLengthChange()
    assert [changed.see(steps) for steps in (48, 48, 84, 48, 84)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_commit_without_a_number_of_steps_keeps_the_known_number():
    changed, empty = ScheduleLengthChange(), ScheduleLengthChange().state_dict()
    changed.see(48)
    changed.load_state_dict(empty)
    assert changed.see(84)


def test_a_schedule_by_a_metric_has_no_number_of_steps():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert not counts_steps(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert counts_steps(torch.optim.lr_scheduler.LinearLR(optimizer))
