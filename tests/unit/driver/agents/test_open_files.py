"""Limit of open files: the driver of many hosts needs many connections."""

import resource

from elastic.driver.agents.open_files import SPARE, UNKNOWN, limit_for
from elastic.errors import Invalid
from harness.golden import raises


def test_sufficient_limit_is_unchanged():
    assert limit_for(100, 1024, 4096) == 1024
    assert limit_for(10_000, resource.RLIM_INFINITY, resource.RLIM_INFINITY) == -1


def test_limit_is_raised_only_as_far_as_needed():
    assert limit_for(1000, 1024, 1_000_000) == SPARE + 2000
    assert limit_for(1000, 1024, resource.RLIM_INFINITY) == SPARE + 2000


def test_one_connection_per_host_must_suffice_if_the_limit_is_low():
    assert limit_for(1000, 1024, 2048) == 2048


def test_insufficient_limit_is_reported_before_the_start():
    with raises(Invalid):
        limit_for(3000, 1024, 2048)


def test_self_connecting_hosts_do_not_count_for_the_limit():
    assert limit_for(None, 1024, 1_000_000) == SPARE + UNKNOWN
    assert limit_for(None, 1024, 4096) == 4096
