"""Advice of `explain` to commit more often, given only if that would lose less work."""

from __future__ import annotations

import pytest

from elastic.driver import events
from elastic.driver.monitoring.explain.findings import Advice, FindingKind, JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Times, Worker
from harness.published import STORE, published, starts

ONE, TWO = Worker("h", 0), Worker("h", 1)
SETTINGS = Settings(np=2, workers_min=1, workers_max=2, elastic=True)


def advice(commits: int) -> list[dict]:
    """Advice for a running job: 40 s of training with ``commits`` commits, of which both workers lost 10 s at a
    kill.
    """
    story = JobHistory(TimeSpent(JobView()))
    story.view.note(events.TimePassed(), starts(ONE, TWO), 0.0)
    for each in (ONE, TWO):
        story.view.note(events.WorkerReady(each, 0, None, STORE, running=True), [], 1.0)
    story.view.note(events.TimePassed(), [published(1, ONE, TWO, commit=Commit(1, 0))], 1.0)
    number = Commit(1, commits)
    times = Times(training=30.0)
    story.view.note(events.WorkerSpent(ONE, 1, times, "training", number), [], 31.0)
    exited = events.WorkerExited(TWO, -9)
    story.view.note(exited, [events.BreakWorld(1, [ONE], because(ReasonKind.TOLD, text="x"))], 41.0)
    ready = events.WorkerReady(ONE, 1, number, STORE, running=True)
    story.view.note(ready, [published(2, ONE, commit=number)], 41.5)
    times = Times(training=30.0, recovering=0.5, lost=10.0)
    story.view.note(events.WorkerSpent(ONE, 2, times, "training", number), [], 41.5)
    found = findings(story, JournalState(SETTINGS, runs=True))
    [incident] = [each for each in found if each.what is FindingKind.INCIDENT]
    assert incident.facts["uncommitted"] is (commits == 0)
    advised = [each for each in found if each.what is FindingKind.ADVICE]
    assert all(sentence(each) for each in advised)
    wanted = (Advice.COMMIT_MORE_OFTEN.value, Advice.CALL_COMMIT.value)
    return [each.facts for each in advised if each.facts["advice"] in wanted]


def test_frequent_commits_cause_no_advice():
    assert advice(600) == []


def test_rare_commits_cause_advice_with_their_interval():
    [facts] = advice(2)
    assert facts["share"] > 0.2 and facts["commits"] == 2
    assert facts["every_s"] == pytest.approx(20.0, abs=0.5)


def test_advice_when_no_commit_was_made_then_names_the_call():
    [facts] = advice(0)
    assert facts["advice"] == Advice.CALL_COMMIT.value
    assert facts["share"] > 0.2
