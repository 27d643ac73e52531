"""When a snapshot of a journal is due."""

from __future__ import annotations

import pytest

from elastic.driver.events import Report, ReportRecovery, TimePassed
from elastic.driver.journal.entries import Entry
from elastic.driver.journal.snapshot_schedule import FORCED, SnapshotSchedule
from elastic.driver.reasons import ReasonKind, because

EVENT = Entry(1.0, TimePassed())
LOGGED = Entry(1.0, TimePassed(), [Report("info", "text")])
RECOVERY = ReportRecovery(2, "recovery", because(ReasonKind.FIRST_START), 8, 68.0, {}, 0)
RECOVERED = Entry(1.0, TimePassed(), [Report("info", "text"), RECOVERY])


def counted(*entries: Entry, size: int = 10, snapshot: int = 0) -> SnapshotSchedule:
    """Return the schedule after a snapshot of ``snapshot`` bytes, and entries of ``size`` bytes each."""
    schedule = SnapshotSchedule(every=4)
    schedule.taken(snapshot)
    for entry in entries:
        schedule.count(entry, size)
    return schedule


@pytest.mark.parametrize(("count", "due"), [(0, False), (3, False), (4, True)])
def test_snapshot_when_there_was_none_then_is_due_after_the_least_number_of_entries(count, due):
    assert counted(*[EVENT] * count).due() is due


@pytest.mark.parametrize(("snapshot", "due"), [(60, True), (61, False)])
def test_snapshot_when_no_recovery_was_completed_then_is_due_once_entries_have_its_size(
    snapshot, due
):
    assert counted(*[LOGGED] * 6, snapshot=snapshot).due() is due


@pytest.mark.parametrize(("count", "due"), [(2, False), (3, True)])
def test_snapshot_when_a_recovery_was_completed_then_is_due_however_small_its_entries_are(
    count, due
):
    schedule = counted(*[EVENT] * count, RECOVERED, snapshot=10**6)
    assert schedule.due() is due
    assert not schedule.overdue()


def test_snapshot_when_one_was_taken_after_a_recovery_then_is_not_due_again():
    schedule = counted(*[EVENT] * 4, RECOVERED, snapshot=10**6)
    schedule.taken(10**6)
    for _ in range(8):
        schedule.count(EVENT, 10)
    assert schedule == SnapshotSchedule(4, 8, 80, False, 10**6)
    assert not schedule.due()


def test_snapshot_when_a_driver_resumes_then_the_entries_it_replayed_count():
    schedule = SnapshotSchedule(every=4, entries=4)
    assert schedule.due()


@pytest.mark.parametrize(
    ("count", "snapshot", "overdue"),
    [
        (4 * FORCED - 1, 0, False),
        (4 * FORCED, 0, True),
        (4 * FORCED, 40, True),
        (4 * FORCED, 41, False),
    ],
)
def test_snapshot_when_workers_wait_then_is_overdue_after_several_times_the_entries(
    count, snapshot, overdue
):
    assert counted(*[RECOVERED] * count, snapshot=snapshot).overdue() is overdue
