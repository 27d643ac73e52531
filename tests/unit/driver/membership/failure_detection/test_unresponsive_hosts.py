"""Hosts whose kernel responds but whose agent does not: lost once all other workers wait for theirs."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver.events import BreakWorld, GiveUpHost, HostLost, ProbeWorkers, PublishWorld
from elastic.driver.membership.failure_detection.unresponsive_hosts import (
    LATE_S,
    READ_S,
    UnresponsiveHosts,
)
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import (
    MembershipConversation,
    exited,
    has,
    hosts,
    inside,
    names,
    order,
    outside,
    said,
    the,
)
from harness.golden import recorded

LEASE_S = 2.0


def on_hosts(*slots: int, **settings: Any) -> MembershipConversation:
    """Train in generation 2 on hosts a, b, ... with ``slots`` slots each."""
    talk = MembershipConversation(np=sum(slots), workers_min=1, silence_s=LEASE_S, **settings)
    there = {chr(ord("a") + n): count for n, count in enumerate(slots)}
    talk.tell(hosts(**there))
    workers = [f"{host}:{slot}" for host, count in there.items() for slot in range(count)]
    talk.connect(*workers)
    talk.ready(*workers, running=False)
    talk.ready(*workers)
    talk.resume()
    assert talk.m.generation == 2
    return talk


def given_up(actions: list[Any]) -> list[str]:
    return [each.host for each in actions if isinstance(each, GiveUpHost)]


def test_unresponsive_host_is_lost_after_a_lease_when_all_other_workers_wait():
    talk = on_hosts(1, 1, 2)
    began = talk.now
    talk.wait(1.0)
    actions = talk.tell(inside("a:0", 2), inside("b:0", 2))
    asked = the(ProbeWorkers, actions).workers
    assert "c" in {each.host for each in asked} and len({each.host for each in asked}) == len(asked)
    actions = talk.wait(LEASE_S / 2)
    assert given_up(actions) == ["c"]
    assert talk.m.worlds.actions.now - began < LEASE_S + 0.1
    action = the(GiveUpHost, actions)
    assert action.reason.kind is ReasonKind.HOST_SILENT
    assert action.reason == because(ReasonKind.HOST_SILENT, for_s=1.0)
    actions = talk.tell(HostLost("c", str(action.reason)))
    assert has(BreakWorld, actions)
    recorded("log", said(actions))
    world = the(PublishWorld, talk.ready("a:0", "b:0", commit=(2, 5)))
    assert order(world) == ["a:0#1", "b:0#1"]


@pytest.mark.parametrize("answer", ["to the question", "a word of a worker"])
def test_host_that_answers_is_only_queried_again(answer):
    talk = on_hosts(1, 1)
    if answer == "to the question":
        talk.works("b:0")
    talk.wait(1.0)
    talk.tell(inside("a:0", 2))
    if answer == "a word of a worker":
        talk.tell(outside("b:0", 2))
        talk.works("b:0")
    asked = 0
    for _ in range(5):
        actions = talk.wait(LEASE_S)
        assert not given_up(actions)
        asked += sum(isinstance(each, ProbeWorkers) for each in actions)
    assert 4 <= asked <= 8, "once a lease, and now and then what the process does"


def test_query_of_a_host_is_not_a_sample_of_a_suspect():
    """Two samples at nearly the same time would show no activity of a busy process."""
    talk = on_hosts(1, 1)
    talk.works("b:0", cpu=1.0)
    talk.wait(1.0)
    talk.tell(inside("a:0", 2))
    assert not has(BreakWorld, talk.wait(100)) and "idle" not in said(talk.wait(100))


def test_no_host_is_lost_while_a_worker_elsewhere_is_awaited_too():
    talk = on_hosts(1, 1, 1)
    talk.works("b:0")
    talk.wait(1.0)
    talk.tell(inside("a:0", 2))
    assert not given_up(talk.wait(4 * LEASE_S)), "b works, perhaps all wait for b"
    talk.tell(inside("b:0", 2))
    assert given_up(talk.wait(1.2 * LEASE_S)) == ["c"]


def test_long_phase_excuses_a_silent_host():
    talk = on_hosts(1, 1)
    talk.tell(outside("b:0", 2, phase="evaluation"))
    talk.wait(1.0)
    talk.tell(inside("a:0", 2))
    assert not given_up(talk.wait(60))


def test_host_with_a_waiting_worker_is_not_queried():
    talk = on_hosts(1, 2)
    talk.wait(1.0)
    talk.tell(inside("a:0", 2), inside("b:0", 2))
    assert not has(ProbeWorkers, talk.wait(LEASE_S))


def test_silent_host_is_detected_while_survivors_gather():
    talk = on_hosts(1, 1, 1)
    talk.works("b:0")
    talk.tell(exited("a:0"))
    talk.ready("b:0", commit=(2, 5))
    actions = talk.wait(LEASE_S + 2 * READ_S)
    assert given_up(actions) == ["c"]


def test_short_wait_causes_no_query():
    talk = on_hosts(1, 1)
    talk.tell(exited("a:0"))
    actions = talk.ready("b:0", commit=(2, 5))
    assert not has(ProbeWorkers, [*actions, *talk.wait(20)])


def test_silent_host_is_detected_without_limits_for_stuck_workers():
    talk = on_hosts(1, 1, idle_s=0, busy_s=0, busy_warning_s=0)
    talk.wait(1.0)
    talk.tell(inside("a:0", 2))
    assert given_up(talk.wait(LEASE_S)) == ["b"]


def test_all_awaited_hosts_may_be_lost_at_once():
    talk = on_hosts(1, 1, 1)
    talk.wait(1.0)
    talk.tell(inside("a:0", 2))
    assert given_up(talk.wait(LEASE_S)) == ["b", "c"]
    assert not names(talk.tell(HostLost("b", "x")), GiveUpHost)


def look(silence: UnresponsiveHosts, now: float | None = None) -> frozenset[str]:
    """Sample at ``now``, by default at the time of the next sample."""
    assert silence.look_at is not None
    return silence.silent(silence.look_at if now is None else now)


def test_late_sample_queries_the_host_again():
    silence = UnresponsiveHosts(2.0)
    silence.begin(10.0, 11.0)
    assert silence.look_at == 11.0 and not look(silence) and silence.ask(["h"], 11.0)
    late = silence.look_at + LATE_S + 0.1
    assert not look(silence, late) and silence.ask(["h"], late)
    first = silence.look_at
    assert not look(silence) and silence.look_at == first + READ_S
    assert look(silence) == {"h"}


def test_answer_that_was_not_read_yet_counts():
    silence = UnresponsiveHosts(2.0)
    silence.begin(10.0, 11.0)
    look(silence)
    silence.ask(["h"], 11.0)
    assert not look(silence)
    assert silence.answered("h") and not silence.answered("h")
    assert not look(silence)
