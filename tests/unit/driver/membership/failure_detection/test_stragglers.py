"""Stragglers: the worker that never waits while all others do, although the training progresses."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.events import Action, PrepareChange, ProbeWorkers, WorkerProgressed
from elastic.driver.membership.failure_detection.stragglers import LITTLE, RECOVERS, Stragglers
from elastic.driver.reasons import ReasonKind
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Worker
from harness.conversation import (
    MembershipConversation,
    exited,
    has,
    hosts,
    inside,
    outside,
    paced,
    running,
    said,
    worker,
)
from harness.golden import recorded


def test_worker_that_never_waits_while_all_peers_do_is_named():
    talk = running(4)
    assert talk.tell(paced("h:0", 2, 0.7), paced("h:1", 2, 0.6), paced("h:3", 2, 0.65)) == []
    recorded("log", said(talk.tell(paced("h:2", 2, 0.02))))
    assert talk.m.stragglers == {worker("h:2")}


def test_straggler_is_named_once_until_another_worker_is_slow():
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


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=40),
    st.sampled_from([0.0, 0.3, 0.5, 0.9]),
)
def test_speed_when_workers_report_then_is_relative_to_the_median_of_their_peers(reports, factor):
    size = 6
    found = Stragglers(size, factor)
    last: dict[int, float] = {}
    slow: set[int] = set()
    for slot, share in reports:
        last[slot] = 1.0 - share
        found.paced(Worker("h", slot), share, 1.0)
        for each in last:
            others = [busy for other, busy in last.items() if other != each]
            limit = min(1.0, factor * (RECOVERS if each in slow else 1.0))
            limit *= each in slow or 1.0 - last[each] < LITTLE
            enough = others and 2 * len(others) >= size - 1
            speed = statistics.median_low(others) / last[each] if enough and last[each] else 1.0
            assert found.speed(Worker("h", each)) == (speed if enough else None)
            (slow.add if enough and speed < limit else slow.discard)(each)
        assert found.named == {Worker("h", each) for each in slow}


def test_straggler_when_its_speed_is_near_the_factor_then_is_named_once():
    found = Stragglers(3, 0.5)
    for other in (1, 2):
        found.paced(Worker("h", other), 0.55, 1.0)
    changes = [found.paced(Worker("h", 0), waited, 1.0) for waited in (0.0, 0.2, 0.0, 0.2, 0.3)]
    assert changes == [True, False, False, False, True]


def slow_world(**settings) -> MembershipConversation:
    """Three workers train, a fourth one stands by."""
    talk = running(3, workers_min=1, standbys=1, **settings)
    talk.tell(hosts(h=4))
    talk.join("h:3")
    assert talk.m.roster[worker("h:3")].stands_by
    return talk


def reports(talk: MembershipConversation, slow: str = "h:1", share: float = 0.0) -> list[Action]:
    others = [f"h:{n}" for n in range(3) if f"h:{n}" != slow]
    return talk.tell(
        *(paced(name, talk.m.generation, 0.7) for name in others),
        paced(slow, talk.m.generation, share),
    )


def test_straggler_when_persistent_and_a_standby_is_ready_then_is_replaced_at_a_commit():
    talk = slow_world(replace_stragglers=True)
    assert not has(PrepareChange, reports(talk))
    assert has(PrepareChange, [*reports(talk), *talk.wait(1.0)])
    talk.stop_all(4)
    assert talk.members == ["h:0#1", "h:2#1", "h:3#1"]
    leaving = talk.m.roster[worker("h:1")].leaving
    assert leaving is not None and leaving.kind is ReasonKind.REPLACED
    assert leaving.facts["speed"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("replaces", "standby", "share"), [(False, True, 0.0), (True, False, 0.0), (True, True, 0.6)]
)
def test_straggler_when_not_to_be_replaced_then_the_world_stays(replaces, standby, share):
    talk = slow_world(replace_stragglers=replaces)
    if not standby:
        talk.tell(exited("h:3"))
    for _ in range(4):
        assert not has(PrepareChange, [*reports(talk, share=share), *talk.wait(1.0)])


def test_straggler_when_in_a_long_phase_then_is_not_named():
    talk = running(3)
    talk.tell(WorkerProgressed(worker("h:1"), 2, 5, phase="checkpoint"))
    reports(talk)
    assert not talk.m.stragglers


def test_straggler_when_the_factor_is_zero_then_no_worker_is_named():
    talk = running(3, straggler_factor=0.0)
    reports(talk)
    assert not talk.m.stragglers


@pytest.mark.parametrize(
    "settings",
    [
        {"straggler_factor": 1.0},
        {"straggler_factor": -0.1},
        {"replace_stragglers": True},
        {"replace_stragglers": True, "standbys": 1, "straggler_factor": 0.0},
    ],
)
def test_settings_when_stragglers_could_not_be_replaced_then_are_refused(settings):
    with pytest.raises(Invalid):
        Settings(np=2, workers_min=1, workers_max=2, elastic=True, **settings)
