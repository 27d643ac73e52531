"""Accounting of a worker's time."""

from __future__ import annotations

import msgspec

from elastic.monitoring.time_account import TimeAccount
from elastic.protocol.messages import Times


def total(times: Times) -> float:
    return float(sum(msgspec.structs.astuple(times)))


def trained() -> TimeAccount:
    """Joins for 10 s, trains for 20, commits for 1; then it is 131."""
    account = TimeAccount(100.0)
    account.begin("training", 110.0)
    account.begin("committing", 130.0)
    account.committed(131.0)
    account.begin("training", 131.0)
    return account


def test_each_second_is_booked_once():
    assert trained().times(135.0) == Times(training=24.0, committing=1.0, joining=10.0)


def test_time_after_the_newest_commit_is_lost_when_the_worker_steps_back():
    account = trained()
    account.begin("data", 132.0)
    account.begin("training", 134.0)
    account.begin("committing", 137.0)  # a commit that is not completed
    account.begin("recovering", 138.0)
    account.stepped_back()
    times = account.times(140.0)
    expected = Times(training=20.0, committing=1.0, recovering=2.0, joining=10.0, lost=7.0)
    assert times == expected
    assert total(times) == 40.0


def test_recovery_begins_when_the_world_broke_even_when_noticed_later():
    account = trained()
    account.begin("recovering", 140.0, since=138.5)
    assert account.times(140.0).recovering == 1.5


def test_a_recovery_does_not_begin_before_the_last_change():
    account = trained()
    account.begin("recovering", 140.0, since=90.0)  # of a world long ago
    assert account.times(140.0) == Times(
        training=20.0, committing=1.0, recovering=9.0, joining=10.0
    )


def test_planned_change_loses_no_time():
    account = trained()
    account.begin("joining", 140.0)
    account.committed(141.0)
    account.stepped_back()
    assert account.times(141.0) == Times(training=29.0, committing=1.0, joining=11.0)


def test_stepping_back_twice_loses_time_once():
    account = trained()
    account.begin("recovering", 133.0)
    account.stepped_back()
    account.stepped_back()
    assert account.times(133.0).lost == 2.0


def test_wait_is_booked_even_when_an_exception_is_raised():
    account = TimeAccount(0.0, "training")
    try:
        with account.during("storage"):
            assert account.part == "storage"
            raise OSError
    except OSError:
        pass
    assert account.part == "training"


def test_commit_covers_the_time_before_its_completion():
    account = trained()
    account.begin("committing", 140.0)
    account.committed(141.0, "training")
    account.stepped_back()
    assert account.times(143.0) == Times(training=31.0, committing=2.0, joining=10.0)


def test_time_before_the_training_function_is_not_booked_as_training():
    account = TimeAccount(0.0)
    account.begin("training", 2.0)  # after init() of a job of a fixed size
    account.begin("joining", 8.0)
    account.only_prepared()
    account.begin("training", 9.0)
    account.committed(9.0)
    assert account.times(12.0) == Times(training=3.0, joining=9.0)
