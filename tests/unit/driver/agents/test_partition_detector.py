"""Decision whether a host is lost or the driver is cut off."""

from __future__ import annotations

from elastic.driver.agents.partition_detector import PartitionDetector


def reached(*hosts: str) -> PartitionDetector:
    found = PartitionDetector()
    for host in hosts:
        assert found.here(host) == []
    return found


def test_host_is_lost_while_another_is_reachable():
    reach = reached("a", "b", "c")
    reach.away("a")
    assert reach.overdue("a")
    assert not reach.cut_off


def test_no_host_is_lost_while_all_are_unreachable():
    reach = reached("a", "b")
    for host in "ab":
        reach.away(host)
    assert not reach.overdue("a") and not reach.overdue("b")
    assert reach.cut_off


def test_each_host_gets_its_time_again_once_one_is_reachable():
    reach = reached("a", "b", "c")
    for host in "abc":
        reach.away(host)
    assert not reach.overdue("a") and not reach.overdue("b")
    assert reach.here("b") == ["a"], "c is not overdue yet anyway"
    assert not reach.cut_off
    assert reach.overdue("a") and reach.overdue("c")


def test_only_host_is_lost_as_usual():
    reach = reached("a")
    assert reach.overdue("a")


def test_host_that_never_connected_does_not_matter():
    reach = reached("a")
    assert reach.overdue("never") and reach.overdue("a")


def test_all_hosts_are_lost_when_the_driver_gives_up():
    reach = reached("a", "b")
    for host in "ab":
        reach.away(host)
    for host in "ab":
        reach.overdue(host)
    assert reach.give_up() == ["a", "b"]
    assert not reach.cut_off
    assert reach.here("a") == []
    assert reach.overdue("a"), "it is the only one now"


def test_dismissed_host_counts_neither_as_reachable_nor_as_missing():
    reach = reached("a", "b")
    reach.drop("b")
    reach.away("a")
    assert reach.overdue("a"), "it was the only one"
    assert not reach.cut_off
