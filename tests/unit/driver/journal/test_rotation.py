"""When a journal file continues in a new segment, and which older segments are deleted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.journal.rotation import OVERDUE, OlderSegment, SegmentLimits, surplus

LIMITS = SegmentLimits(least=100, snapshots=8, kept=1000)


@pytest.mark.parametrize(
    ("size", "snapshot", "reached", "overdue"),
    [
        (99, 0, False, False),
        (100, 0, True, False),
        (100 * OVERDUE, 0, True, True),
        (100, 12, True, False),
        (100, 13, False, False),
        (104, 13, True, False),
        (104 * OVERDUE - 1, 13, True, False),
        (104 * OVERDUE, 13, True, True),
    ],
)
def test_segment_ends_at_its_minimum_size_and_a_multiple_of_its_snapshot(
    size, snapshot, reached, overdue
):
    assert LIMITS.reached(size, snapshot) is reached
    assert LIMITS.reached(size, snapshot, overdue=True) is overdue


def test_oldest_segments_of_the_oldest_jobs_are_deleted_first():
    own = [OlderSegment(0, number, 300) for number in (4, 5)]
    earlier = [OlderSegment(1, number, 300) for number in (7, 8)]
    oldest = [OlderSegment(3, 1, 10)]
    assert surplus([*oldest, *earlier, *own], LIMITS) == [earlier[0], *oldest]
    assert surplus([*earlier, *own], SegmentLimits(kept=299)) == [own[0], *earlier[::-1]]
    assert surplus(own, LIMITS) == surplus([], LIMITS) == []


def test_newest_older_segment_is_kept_when_it_exceeds_the_limit_alone():
    large = OlderSegment(0, 2, 5000)
    assert surplus([large], LIMITS) == []
    assert surplus([large, OlderSegment(0, 1, 1)], LIMITS) == [OlderSegment(0, 1, 1)]


SEGMENTS = st.lists(
    st.builds(OlderSegment, st.integers(0, 5), st.integers(1, 9), st.integers(0, 700)),
    unique_by=lambda each: (each.job, each.number),
)


@given(SEGMENTS)
def test_kept_segments_are_bounded_and_have_no_gap(segments):
    deleted = surplus(segments, LIMITS)
    kept = [each for each in segments if each not in deleted]
    newest = max(segments, key=lambda each: (-each.job, each.number), default=None)
    assert sum(each.size for each in kept if each is not newest) <= LIMITS.kept
    assert newest is None or newest in kept
    for each in kept:
        newer = [other for other in segments if other[:1] == each[:1] and other[1] > each[1]]
        assert all(other in kept for other in newer)
