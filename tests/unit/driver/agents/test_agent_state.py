"""Whom an agent serves, and for how long without a driver."""

from __future__ import annotations

import pytest

from elastic.driver.agents.agent_state import EXITS_LIMIT, Agency, Terms
from elastic.driver.agents.messages import Hire
from elastic.driver.events import WorkerExited
from elastic.protocol.messages import Worker

A = Worker("h", 0)


def hire(term=1, job="one"):
    return Hire(job, term, lease_s=2.0, away_s=60.0)


@pytest.fixture
def agency() -> Agency:
    found = Agency()
    assert found.hired(hire()) == Terms()
    return found


def test_a_driver_of_a_lower_term_is_turned_away(agency):
    assert not agency.hired(hire(term=3)).refused
    assert (
        "its term is 2, and this agent serves one of term 3" in agency.hired(hire(term=2)).refused
    )
    assert not agency.hired(hire(term=3)).refused


def test_a_driver_of_a_greater_term_makes_ours_one_of_the_past(agency):
    assert agency.superseded(2)
    assert not agency.superseded(1)
    agency.lost(now=10.0)
    assert not agency.superseded(2), "it looks for one anyway"


def test_where_etcd_has_lost_its_terms_its_word_on_who_leads_counts_for_another_job(agency):
    agency.hired(hire(term=5))
    assert agency.hired(hire(term=1, job="two")).refused
    assert agency.hired(hire(term=1), seated=1).refused, "not for the same job"
    assert not agency.hired(hire(term=1, job="two"), seated=1).refused
    assert agency.term == 1


def test_another_job_of_a_greater_term_ends_the_present_one(agency):
    agency.exited(WorkerExited(A, 1))
    terms = agency.hired(hire(term=2, job="two"))
    assert terms.kill and not terms.refused
    assert (agency.job, [*agency.exits]) == ("two", [])


def test_the_same_job_goes_on_under_its_next_driver(agency):
    agency.exited(WorkerExited(A, 1))
    agency.lost(now=10.0)
    terms = agency.hired(hire(term=2))
    assert not terms.kill and not terms.refused
    assert [*agency.exits] == [A] and agency.away_by is None


def test_it_waits_for_a_driver_as_long_as_it_was_told_and_no_longer(agency):
    agency.lost(now=10.0)
    agency.lost(now=50.0)  # another try has failed: that begins nothing anew
    assert agency.away_by == 70.0
    assert not agency.given_up(now=69.9)
    assert agency.given_up(now=70.0)
    assert "its job is over" in agency.hired(hire(term=2)).refused


def test_without_a_job_it_waits_for_nothing():
    agency = Agency()
    agency.lost(now=10.0)
    assert agency.away_by is None and not agency.given_up(now=1e9)


def test_a_generation_without_this_host_fences_it_once_its_lease_is_lost(agency):
    agency.told(4)
    assert not agency.fenced(5, now=9.0), "it has a driver, who will tell"
    agency.lost(now=10.0)
    assert not agency.fenced(5, now=11.9), "its lease still runs"
    assert not agency.fenced(4, now=13.0), "that is its own generation"
    assert agency.fenced(5, now=13.0)
    assert not agency.fenced(6, now=14.0), "once is enough"


def test_a_worker_is_started_once(agency):
    assert agency.may_start(A)
    agency.exited(WorkerExited(A, 0))
    assert not agency.may_start(A)
    assert agency.may_start(A.next())


def test_nothing_is_started_for_a_job_that_is_over(agency):
    agency.dismissed()
    assert not agency.may_start(A)


def test_what_it_remembers_is_bounded(agency):
    for n in range(EXITS_LIMIT + 5):
        agency.exited(WorkerExited(Worker("h", n), 1))
    assert len(agency.exits) == EXITS_LIMIT
    assert Worker("h", 4) not in agency.exits
