"""Cooldown of failed slots."""

from __future__ import annotations

from elastic.driver.membership.scheduling.cooldown import Cooldown
from elastic.driver.membership.scheduling.slots import Slots
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker

A, B = ("h", 0), ("h", 1)


def cooldown(**changes) -> Cooldown:
    return Cooldown(**{"min_s": 1.0, "max_s": 60.0, "attempts": 5, **changes})


def slots(**hosts: int) -> Slots:
    made = Slots(Settings(np=2, workers_min=1, workers_max=4, elastic=True, slot_attempts=2))
    made.announce(hosts)
    return made


def test_cooldown_doubles_after_each_failure_up_to_the_maximum():
    c = cooldown(attempts=99, max_s=5.0)
    assert [c.failed(A, 10.0, fruitful=False) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert c.ready_at(A) == 15.0
    assert c.ready_at(B) == 0.0  # another slot of the same host


def test_slot_is_given_up_after_the_maximum_number_of_attempts():
    c = cooldown(attempts=3)
    assert [c.failed(A, 0.0, fruitful=False) for _ in range(3)] == [1.0, 2.0, None]
    assert c.given_up(A) and c.ready_at(A) is None
    assert not c.given_up(B)


def test_worker_with_progress_costs_the_shortest_cooldown():
    c = cooldown(attempts=1)
    assert [c.failed(A, 0.0, fruitful=True) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_progress_clears_the_failures_but_not_the_cooldown():
    c = cooldown()
    c.failed(A, 10.0, fruitful=False)
    c.failed(A, 10.0, fruitful=False)
    c.clear([A, B])
    assert c.ready_at(A) == 12.0
    assert c.failed(A, 20.0, fruitful=False) == 1.0


def test_host_is_given_up_only_by_policy():
    c = cooldown(attempts=1, host_attempts=1)
    c.failed(A, 0.0, fruitful=False)
    assert c.given_up(B)
    c.forget_host("h")  # a new machine with an old name
    assert not c.given_up(A) and not c.given_up(B)


def test_thousand_failures_do_not_overflow():
    c = cooldown(attempts=10_000)
    assert [c.failed(A, 0.0, fruitful=False) for _ in range(2000)][-1] == 60.0


def test_slots_are_used_once_each_in_the_order_of_the_list():
    s = slots(b=1, a=2)
    assert s.free({}, 0.0, short=False) == [("b", 0), ("a", 0), ("a", 1)]
    assert s.start(("a", 0)) == Worker("a", 0, 1)
    assert s.free({"a": [Worker("a", 0, 1)]}, 0.0, short=False) == [("b", 0), ("a", 1)]
    assert s.start(("a", 0)) == Worker("a", 0, 2)


def test_slots_left_by_workers_are_used_only_when_too_few_remain_or_listed_again():
    s = slots(a=2)
    s.leave(("a", 0))
    assert s.free({}, 0.0, short=False) == [("a", 1)]
    assert s.free({}, 0.0, short=True) == [("a", 0), ("a", 1)]
    s.announce({"a": 2})
    assert s.free({}, 0.0, short=False) == [("a", 1)]
    s.announce({})
    s.announce({"a": 2})
    assert s.free({}, 0.0, short=False) == [("a", 0), ("a", 1)]


def test_slot_whose_program_exited_with_0_is_not_used_again():
    s = slots(a=2)
    s.complete(("a", 0))
    assert s.free({}, 0.0, short=True) == [("a", 1)]


def test_list_is_exhausted_when_all_slots_are_given_up_but_not_when_empty():
    s = slots(a=1)
    assert s.failed(("a", 0), 0.0, fruitful=False) == 1.0
    assert s.next_at({}, 0.5, short=False) == 1.0 and not s.spent()
    s.failed(("a", 0), 0.0, fruitful=False)
    assert s.spent() and s.next_at({}, 0.5, short=False) is None
    s.announce({})
    assert not s.spent()
