"""Stragglers: the worker that never waits while all others do, although the training progresses."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.events import ProbeWorkers
from elastic.driver.membership.failure_detection.stragglers import LITTLE, MUCH, Stragglers
from elastic.protocol.messages import Worker
from harness.conversation import exited, has, inside, outside, paced, running, said, worker
from harness.golden import recorded


def test_worker_that_never_waits_while_the_others_do_is_named():
    talk = running(4)
    assert talk.tell(paced("h:0", 2, 0.7), paced("h:1", 2, 0.6), paced("h:3", 2, 0.65)) == []
    recorded("log", said(talk.tell(paced("h:2", 2, 0.02))))
    assert talk.m.stragglers == {worker("h:2")}


def test_straggler_is_named_once_until_it_changes():
    talk = running(3)
    round_of = [paced("h:0", 2, 0.6), paced("h:1", 2, 0.6), paced("h:2", 2, 0.01)]
    assert "h:2#1" in said(talk.tell(*round_of))
    assert talk.tell(*round_of * 20) == []
    recorded("log", said(talk.tell(paced("h:2", 2, 0.5))))
    assert talk.m.stragglers == frozenset()
    assert "rank 1" in said(talk.tell(paced("h:1", 2, 0.0), paced("h:2", 2, 0.6)))


def test_no_worker_is_named_in_a_balanced_world():
    talk = running(4)
    for share in (0.0, 0.05, 0.3, 0.95):
        assert talk.tell(*(paced(f"h:{n}", 2, share) for n in range(4))) == []


def test_single_report_is_not_compared():
    talk = running(4)
    assert talk.tell(paced("h:0", 2, 0.0), paced("h:1", 2, 0.9)) == []
    assert "h:0#1" in said(talk.tell(paced("h:2", 2, 0.9)))  # two of the three others


def test_each_world_is_judged_on_its_own_reports():
    talk = running(3)
    talk.tell(paced("h:0", 2, 0.6), paced("h:1", 2, 0.6), paced("h:2", 2, 0.01))
    talk.tell(exited("h:1"))
    talk.ready("h:0", "h:2", commit=(2, 5))
    assert talk.m.generation == 3 and talk.m.stragglers == frozenset()
    assert talk.tell(paced("h:0", 2, 0.9), paced("h:2", 2, 0.0), paced("h:2", 3, 0.0)) == []
    recorded("log", said(talk.tell(paced("h:0", 3, 0.9))))


def test_waits_in_a_reported_stall_do_not_indicate_a_straggler():
    talk = running(3)
    talk.tell(inside("h:0", 2), inside("h:1", 2))
    assert has(ProbeWorkers, talk.wait(20.0))
    talk.tell(outside("h:0", 2, entered=8), outside("h:1", 2, entered=8))
    during = [paced("h:0", 2, 0.6), paced("h:1", 2, 0.6), paced("h:2", 2, 0.01)]
    talk.tell(*during)
    assert not talk.m.stragglers
    talk.wait(60.0)
    talk.tell(*during)
    assert talk.m.stragglers == {worker("h:2")}


def test_single_worker_is_never_a_straggler():
    talk = running(1, workers_min=1)
    assert talk.tell(paced("h:0", 2, 0.0)) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=40))
def test_counting_agrees_with_the_median_of_the_others(reports):
    size = 6
    found = Stragglers(size)
    last: dict[int, float] = {}
    for slot, share in reports:
        last[slot] = share
        found.paced(Worker("h", slot), share, 1.0)
        slow = {
            slot
            for slot, share in last.items()
            if share < LITTLE
            and 2 * (len(last) - 1) >= size - 1
            and statistics.median_low(s for other, s in last.items() if other != slot) > MUCH
        }
        assert found.named == {Worker("h", slot) for slot in slow}
