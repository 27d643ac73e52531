"""Whom an agent serves, and for how long without a driver."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver.agents.agent_state import EXITS_LIMIT, AgentState, AttachOutcome
from elastic.driver.agents.messages import Attach, Detach, Reject, to_agent
from elastic.driver.events import WorkerExited
from elastic.protocol.messages import Worker
from harness.golden import recorded

A = Worker("h", 0)


def attach(term=1, job="one"):
    return Attach(job, term, lease_s=2.0, away_s=60.0)


@pytest.fixture
def state() -> AgentState:
    found = AgentState()
    assert found.attached(attach()) == AttachOutcome()
    return found


def test_a_driver_of_a_lower_term_is_turned_away(state):
    assert not state.attached(attach(term=3)).refused
    recorded("messages", state.attached(attach(term=2)).refused)
    assert not state.attached(attach(term=3)).refused


def test_a_driver_of_a_greater_term_makes_ours_one_of_the_past(state):
    assert state.superseded(2)
    assert not state.superseded(1)
    state.lost(now=10.0)
    assert not state.superseded(2), "it looks for one anyway"


def test_where_etcd_has_lost_its_terms_its_word_on_who_leads_counts_for_another_job(state):
    state.attached(attach(term=5))
    assert state.attached(attach(term=1, job="two"), seated=5).refused
    assert state.attached(attach(term=1), seated=1).refused, "not for the same job"
    assert not state.attached(attach(term=1, job="two"), seated=1).refused
    assert state.term == 1


def test_without_etcd_terms_begin_anew_with_each_job(state):
    state.attached(attach(term=3))
    assert state.attached(attach(term=1, job="two")) == AttachOutcome(kill=True)
    assert state.term == 1


def test_one_of_the_past_is_turned_away_while_nobody_is_served_too(state):
    state.attached(attach(term=3))
    state.release()
    recorded("messages", state.attached(attach(term=2)).refused)


def test_another_job_of_a_greater_term_ends_the_present_one(state):
    state.exited(WorkerExited(A, 1))
    outcome = state.attached(attach(term=2, job="two"))
    assert outcome.kill and not outcome.refused
    assert (state.job, [*state.exits]) == ("two", [])


def test_the_same_job_goes_on_under_its_next_driver(state):
    state.exited(WorkerExited(A, 1))
    state.lost(now=10.0)
    outcome = state.attached(attach(term=2))
    assert not outcome.kill and not outcome.refused
    assert [*state.exits] == [A] and state.away_by is None


def test_it_waits_for_a_driver_as_long_as_it_was_told_and_no_longer(state):
    state.lost(now=10.0)
    state.lost(now=50.0)  # another try has failed: that begins nothing anew
    assert state.away_by == 70.0
    assert not state.given_up(now=69.9)
    assert state.given_up(now=70.0)
    assert not state.attached(attach(term=2)).refused, "its workers are gone, and not the job"


def test_without_a_job_it_waits_for_nothing():
    state = AgentState()
    state.lost(now=10.0)
    assert state.away_by is None and not state.given_up(now=1e9)


def test_a_generation_without_this_host_fences_it_once_its_lease_is_lost(state):
    state.told(4)
    assert not state.fenced(5, now=9.0), "it has a driver, who will tell"
    state.lost(now=10.0)
    assert not state.fenced(5, now=11.9), "its lease still runs"
    assert not state.fenced(4, now=13.0), "that is its own generation"
    assert state.fenced(5, now=13.0)
    assert not state.fenced(6, now=14.0), "once is enough"
    assert not state.attached(attach()).refused, "the host may be used again"


def test_a_worker_is_started_once(state):
    assert state.may_start(A)
    state.exited(WorkerExited(A, 0))
    assert not state.may_start(A)
    assert state.may_start(A.next())


def test_nothing_is_started_for_a_job_that_is_over(state):
    state.detached()
    assert not state.may_start(A)
    recorded("messages", state.attached(attach(term=2)).refused)


def test_a_job_that_goes_on_with_another_agent_of_this_host_may_come_back_to_it(state):
    state.release()
    assert not state.may_start(A)
    assert state.attached(attach()) == AttachOutcome()
    assert state.may_start(A)


def test_what_it_remembers_is_bounded(state):
    for n in range(EXITS_LIMIT + 5):
        state.exited(WorkerExited(Worker("h", n), 1))
    assert len(state.exits) == EXITS_LIMIT
    assert Worker("h", 4) not in state.exits


@pytest.mark.parametrize(
    ("message", "known_as"),
    [(attach(), "Hire"), (Reject(""), "Refused"), (Detach(""), "Dismissed")],
)
def test_agents_of_earlier_releases_know_these_by_their_old_names(message, known_as):
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data)["type"] == known_as
    assert to_agent.decode(data) == message
