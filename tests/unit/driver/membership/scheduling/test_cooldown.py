"""When a failed slot may be used again."""

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


def test_each_failure_doubles_the_wait_up_to_the_longest():
    c = cooldown(attempts=99, max_s=5.0)
    assert [c.failed(A, 10.0, fruitful=False) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert c.ready_at(A) == 15.0
    assert c.ready_at(B) == 0.0  # another slot of the same host


def test_a_slot_is_given_up_after_so_many_attempts():
    c = cooldown(attempts=3)
    assert [c.failed(A, 0.0, fruitful=False) for _ in range(3)] == [1.0, 2.0, None]
    assert c.given_up(A) and c.ready_at(A) is None
    assert not c.given_up(B)


def test_a_fruitful_worker_costs_the_shortest_wait_however_often():
    c = cooldown(attempts=1)
    assert [c.failed(A, 0.0, fruitful=True) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_progress_clears_the_record_but_not_the_wait():
    c = cooldown()
    c.failed(A, 10.0, fruitful=False)
    c.failed(A, 10.0, fruitful=False)
    c.clear([A, B])
    assert c.ready_at(A) == 12.0
    assert c.failed(A, 20.0, fruitful=False) == 1.0


def test_a_host_is_given_up_only_by_policy():
    c = cooldown(attempts=1, host_attempts=1)
    c.failed(A, 0.0, fruitful=False)
    assert c.given_up(B)
    c.forget_host("h")  # a new machine under an old name
    assert not c.given_up(A) and not c.given_up(B)


def test_a_thousand_failures_overflow_nothing():
    c = cooldown(attempts=10_000)
    assert [c.failed(A, 0.0, fruitful=False) for _ in range(2000)][-1] == 60.0


def test_slots_are_used_in_the_order_of_the_list_once_each():
    s = slots(b=1, a=2)
    assert s.free((), 0.0, short=False) == [("b", 0), ("a", 0), ("a", 1)]
    assert s.start(("a", 0)) == Worker("a", 0, 1)
    assert s.free({("a", 0)}, 0.0, short=False) == [("b", 0), ("a", 1)]
    assert s.start(("a", 0)) == Worker("a", 0, 2)


def test_slots_that_were_left_are_used_only_when_there_are_too_few_or_announced_again():
    s = slots(a=2)
    s.leave(("a", 0))
    assert s.free((), 0.0, short=False) == [("a", 1)]
    assert s.free((), 0.0, short=True) == [("a", 0), ("a", 1)]
    s.announce({"a": 2})
    assert s.free((), 0.0, short=False) == [("a", 1)]
    s.announce({})
    s.announce({"a": 2})
    assert s.free((), 0.0, short=False) == [("a", 0), ("a", 1)]


def test_a_slot_whose_program_ended_well_is_not_used_again():
    s = slots(a=2)
    s.complete(("a", 0))
    assert s.free((), 0.0, short=True) == [("a", 1)]


def test_the_list_is_spent_when_all_of_it_is_given_up_and_not_while_it_is_empty():
    s = slots(a=1)
    assert s.failed(("a", 0), 0.0, fruitful=False) == 1.0
    assert s.next_at((), 0.5, short=False) == 1.0 and not s.spent()
    s.failed(("a", 0), 0.0, fruitful=False)
    assert s.spent() and s.next_at((), 0.5, short=False) is None
    s.announce({})
    assert not s.spent()
