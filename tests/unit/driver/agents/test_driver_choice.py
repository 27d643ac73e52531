"""Agent state: the driver it serves, and the time limit without a driver."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver.agents.driver_choice import EXITS_LIMIT, AgentState, AttachOutcome
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


def test_driver_of_a_lower_term_is_rejected(state):
    assert not state.attached(attach(term=3)).refused
    recorded("messages", state.attached(attach(term=2)).refused)
    assert not state.attached(attach(term=3)).refused


def test_driver_of_a_greater_term_replaces_the_current_one(state):
    assert state.superseded(2)
    assert not state.superseded(1)
    state.lost(now=10.0)
    assert not state.superseded(2), "it looks for one anyway"


def test_leader_according_to_etcd_counts_for_another_job_after_etcd_lost_its_terms(state):
    state.attached(attach(term=5))
    assert state.attached(attach(term=1, job="two"), seated=5).refused
    assert state.attached(attach(term=1), seated=1).refused, "not for the same job"
    assert not state.attached(attach(term=1, job="two"), seated=1).refused
    assert state.term == 1


def test_terms_start_again_with_each_job_without_etcd(state):
    state.attached(attach(term=3))
    assert state.attached(attach(term=1, job="two")) == AttachOutcome(kill=True)
    assert state.term == 1


def test_earlier_driver_is_rejected_by_an_agent_without_a_driver(state):
    state.attached(attach(term=3))
    state.release()
    recorded("messages", state.attached(attach(term=2)).refused)


def test_another_job_of_a_greater_term_ends_the_current_one(state):
    state.exited(WorkerExited(A, 1))
    outcome = state.attached(attach(term=2, job="two"))
    assert outcome.kill and not outcome.refused
    assert (state.job, [*state.exits]) == ("two", [])


def test_same_job_continues_under_its_next_driver(state):
    state.exited(WorkerExited(A, 1))
    state.lost(now=10.0)
    outcome = state.attached(attach(term=2))
    assert not outcome.kill and not outcome.refused
    assert [*state.exits] == [A] and state.away_by is None


def test_agent_waits_for_a_driver_as_long_as_configured(state):
    state.lost(now=10.0)
    state.lost(now=50.0)  # another failed attempt does not restart the time
    assert state.away_by == 70.0
    assert not state.given_up(now=69.9)
    assert state.given_up(now=70.0)
    assert not state.attached(attach(term=2)).refused, "its workers are gone, and not the job"


def test_agent_without_a_job_has_no_deadline():
    state = AgentState()
    state.lost(now=10.0)
    assert state.away_by is None and not state.given_up(now=1e9)


def test_generation_without_this_host_kills_its_workers_after_the_lease(state):
    state.record_world(4)
    assert not state.fenced(5, now=9.0), "it has a driver, who will tell"
    state.lost(now=10.0)
    assert not state.fenced(5, now=11.9), "its lease still runs"
    assert not state.fenced(4, now=13.0), "that is its own generation"
    assert state.fenced(5, now=13.0)
    assert not state.fenced(6, now=14.0), "once is enough"
    assert not state.attached(attach()).refused, "the host may be used again"


def test_worker_is_started_once(state):
    assert state.may_start(A)
    state.exited(WorkerExited(A, 0))
    assert not state.may_start(A)
    assert state.may_start(A.next())


def test_ended_job_starts_no_worker(state):
    state.detached()
    assert not state.may_start(A)
    recorded("messages", state.attached(attach(term=2)).refused)


def test_job_that_moved_to_another_agent_of_this_host_may_return(state):
    state.release()
    assert not state.may_start(A)
    assert state.attached(attach()) == AttachOutcome()
    assert state.may_start(A)


def test_remembered_state_is_bounded(state):
    for n in range(EXITS_LIMIT + 5):
        state.exited(WorkerExited(Worker("h", n), 1))
    assert len(state.exits) == EXITS_LIMIT
    assert Worker("h", 4) not in state.exits


@pytest.mark.parametrize(
    ("message", "known_as"),
    [(attach(), "Hire"), (Reject(""), "Refused"), (Detach(""), "Dismissed")],
)
def test_agents_of_earlier_releases_know_messages_by_their_old_names(message, known_as):
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data)["type"] == known_as
    assert to_agent.decode(data) == message
