"""Allocation of an arena's bytes."""

import pytest

from elastic.collectives.shared_memory.allocator import Allocator
from harness.golden import raises

PAGE = 10


def test_regions_are_allocated_consecutively_in_whole_pages():
    regions = Allocator(100, PAGE)
    assert regions.allocate(1) == 0
    assert regions.allocate(15) == 10
    assert regions.allocate(10) == 30
    assert [regions.size_of(offset) for offset in (0, 10, 30)] == [10, 20, 10]
    assert regions.lent == 40


def test_first_sufficient_gap_is_allocated_again():
    regions = Allocator(100, PAGE)
    for size in (10, 20, 30):
        regions.allocate(size)
    regions.free(0)
    regions.free(10)
    assert regions.allocate(31) == 60  # the gap has 30
    assert regions.allocate(30) == 0  # both halves became one
    assert regions.reach == 100


def test_freed_gap_merges_with_adjacent_gaps():
    regions = Allocator(60, PAGE)
    offsets = [regions.allocate(20) for _ in range(3)]
    assert offsets == [0, 20, 40]
    assert regions.allocate(1) is None
    for offset in (0, 40, 20):
        regions.free(offset)
    assert regions.allocate(60) == 0


def test_allocator_is_full_without_a_wide_enough_gap_and_recovers():
    regions = Allocator(45, PAGE)  # the last half page is never allocated
    assert regions.allocate(41) is None
    assert regions.allocate(20) == 0
    assert regions.allocate(30) is None
    regions.free(0)
    assert regions.allocate(30) == 0


def test_an_address_identifies_its_region():
    regions = Allocator(100, PAGE)
    regions.allocate(20)
    regions.allocate(10)
    regions.allocate(10)
    regions.free(20)
    asked = (0, 19, 20, 29, 30, 39, 40)
    assert [regions.around(each) for each in asked] == [0, 0, None, None, 30, 30, None]
    assert Allocator(100, PAGE).around(5) is None


def test_free_of_an_unallocated_region_is_refused():
    regions = Allocator(100, PAGE)
    regions.allocate(20)
    with raises(ValueError):
        regions.free(10)
    with pytest.raises(ValueError, match="0 bytes"):
        regions.allocate(0)
