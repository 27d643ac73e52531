"""The driver of very many hosts needs very many connections."""

import resource

from elastic.driver.agents.open_files import SPARE, UNKNOWN, limit_for
from elastic.errors import Invalid
from harness.golden import raises


def test_a_limit_that_suffices_stays():
    assert limit_for(100, 1024, 4096) == 1024
    assert limit_for(10_000, resource.RLIM_INFINITY, resource.RLIM_INFINITY) == -1


def test_it_is_raised_as_far_as_needed_and_no_further():
    assert limit_for(1000, 1024, 1_000_000) == SPARE + 2000
    assert limit_for(1000, 1024, resource.RLIM_INFINITY) == SPARE + 2000


def test_one_connection_of_each_has_to_do_where_there_is_no_more():
    assert limit_for(1000, 1024, 2048) == 2048


def test_too_few_are_told_before_anything_starts():
    with raises(Invalid):
        limit_for(3000, 1024, 2048)


def test_hosts_that_come_by_themselves_are_not_counted_beforehand():
    assert limit_for(None, 1024, 1_000_000) == SPARE + UNKNOWN
    assert limit_for(None, 1024, 4096) == 4096
