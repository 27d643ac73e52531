"""Islands that take part in a merge. Losses are in tests/simulation."""

import pytest

from elastic.diloco.attendance import Attendance, Notification, absence, needed
from elastic.errors import Invalid
from harness.golden import raises, recorded


def sent(leader, merge=0, weighted=False):
    return Notification(merge, leader, weighted=weighted)


def expired(leader, merge=0):
    return Notification(merge, leader, expired=True)


def decisions(attendance, *notifications):
    return [attendance.receive(each) for each in notifications]


def test_merge_is_decided_once_all_islands_have_sent_their_changes():
    attendance = Attendance((0, 2, 4), 1, merge=0)
    assert decisions(attendance, sent(4), sent(0), sent(2)) == [None, None, (0, 2, 4)]
    assert attendance.merge == 1


def test_late_island_is_not_waited_for_after_the_grace_period():
    attendance = Attendance((0, 2, 4), 2, merge=0)
    assert decisions(attendance, sent(4), sent(0), expired(4)) == [None, None, (0, 4)]
    # The change of the late island is for the next merge.
    assert decisions(attendance, sent(2), expired(0)) == [None, None]
    assert decisions(attendance, sent(2, 1), sent(0, 1)) == [None, None]
    assert not attendance.expired


def test_merge_waits_for_the_quorum_after_the_grace_period():
    attendance = Attendance((0, 1, 2), 2, merge=7)
    assert decisions(attendance, sent(1, 7), expired(1, 7)) == [None, None]
    assert attendance.waits
    assert attendance.receive(sent(0, 7)) == (0, 1)
    assert not attendance.waits


@pytest.mark.parametrize(
    ("quorum", "islands", "wanted"),
    [(None, 1, 1), (None, 2, 1), (None, 3, 2), (None, 4, 2), (3, 5, 3), (3, 2, 2)],
)
def test_quorum_is_half_of_the_islands_by_default_and_at_most_all(quorum, islands, wanted):
    assert needed(quorum, islands) == wanted


def test_absent_islands_are_logged_on_change():
    recorded("messages", absence(7, ["us", "eu"], [], 5.0))
    assert absence(8, ["eu", "us"], ["us", "eu"], 5.0) == ""
    recorded("messages", absence(9, [], ["us"], 5.0))
    assert absence(10, [], [], 5.0) == ""


def test_tokens_of_some_islands_only_are_refused():
    attendance = Attendance((0, 1), 1, merge=0)
    attendance.receive(sent(0, weighted=True))
    with raises(Invalid):
        attendance.receive(sent(1))
