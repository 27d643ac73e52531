"""Whether a host is lost, or we are cut off ourselves."""

from __future__ import annotations

from elastic.driver.agents.partition import Reach


def reached(*hosts: str) -> Reach:
    found = Reach()
    for host in hosts:
        assert found.here(host) == []
    return found


def test_a_host_is_lost_while_others_are_here():
    reach = reached("a", "b", "c")
    reach.away("a")
    assert reach.overdue("a")
    assert not reach.cut_off


def test_nobody_is_lost_while_nobody_is_here():
    reach = reached("a", "b")
    for host in "ab":
        reach.away(host)
    assert not reach.overdue("a") and not reach.overdue("b")
    assert reach.cut_off


def test_once_one_is_heard_of_again_each_of_the_others_gets_its_time():
    reach = reached("a", "b", "c")
    for host in "abc":
        reach.away(host)
    assert not reach.overdue("a") and not reach.overdue("b")
    assert reach.here("b") == ["a"], "c is not overdue yet anyway"
    assert not reach.cut_off
    assert reach.overdue("a") and reach.overdue("c")


def test_the_only_host_is_lost_like_any():
    reach = reached("a")
    assert reach.overdue("a")


def test_one_that_never_came_holds_nobody_up():
    reach = reached("a")
    assert reach.overdue("never") and reach.overdue("a")


def test_after_too_long_all_are_lost():
    reach = reached("a", "b")
    for host in "ab":
        reach.away(host)
    for host in "ab":
        reach.overdue(host)
    assert reach.give_up() == ["a", "b"]
    assert not reach.cut_off
    assert reach.here("a") == []
    assert reach.overdue("a"), "it is the only one now"


def test_a_host_that_was_let_go_counts_neither_as_reached_nor_as_missing():
    reach = reached("a", "b")
    reach.drop("b")
    reach.away("a")
    assert reach.overdue("a"), "it was the only one"
    assert not reach.cut_off
