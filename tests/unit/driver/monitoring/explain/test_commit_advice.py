"""Whether `explain` advises to commit more often: only where that would lose less."""

from __future__ import annotations

import pytest

from elastic.driver import events
from elastic.driver.monitoring.explain.findings import Advice, JournalState, What, findings
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.explain.story import Story
from elastic.driver.reasons import Why, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Address, Commit, Place, Times, Worker

ONE, TWO = Worker("h", 0), Worker("h", 1)
SETTINGS = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
STORE = Address("h", 1)
WHY = because(Why.ENTERING)


def world(generation: int, commit: int, *workers: Worker) -> events.PublishWorld:
    members = [
        events.Member(each, Place(rank, len(workers), rank, len(workers), 0, 1))
        for rank, each in enumerate(workers)
    ]
    known = Commit(1, commit) if commit else None
    return events.PublishWorld(generation, members, STORE, 1 if commit else 0, known, WHY)


def advice(commits: int) -> list[dict]:
    """Of a job that runs: 40 s of training, of which both have lost 10 s, as one was killed; and so many commits."""
    story = Story()
    place = Place(0, 2, 0, 2, 0, 1)
    story.note(
        events.TimePassed(), [events.StartWorker(each, place, WHY) for each in (ONE, TWO)], 0.0
    )
    for each in (ONE, TWO):
        story.note(events.WorkerReady(each, 0, None, STORE, running=True), [], 1.0)
    story.note(events.TimePassed(), [world(1, 0, ONE, TWO)], 1.0)
    number = Commit(1, commits) if commits else None
    said = Times(training=30.0)
    story.note(events.WorkerSpent(ONE, 1, said, "training", number), [], 31.0)
    exited = events.WorkerExited(TWO, -9)
    story.note(exited, [events.BreakWorld(1, [ONE], because(Why.TOLD, text="x"))], 41.0)
    story.note(
        events.WorkerReady(ONE, 1, number, STORE, running=True), [world(2, commits, ONE)], 41.5
    )
    said = Times(training=30.0, recovering=0.5, lost=10.0)
    story.note(events.WorkerSpent(ONE, 2, said, "training", number), [], 41.5)
    found = findings(story, JournalState(SETTINGS, runs=True))
    told = [each for each in found if each.what is What.ADVICE]
    assert all(sentence(each) for each in told)
    return [each.facts for each in told if each.facts["advice"] == Advice.COMMIT_MORE_OFTEN.value]


def test_it_does_not_when_a_commit_is_made_every_moment():
    assert advice(600) == []


@pytest.mark.parametrize(("commits", "every_s"), [(2, 20.0), (0, 40.0)])
def test_it_does_and_says_how_often_there_is_one_when_they_are_rare(commits, every_s):
    [facts] = advice(commits)
    assert facts["share"] > 0.2 and facts["commits"] == commits
    assert facts["every_s"] == pytest.approx(every_s, abs=0.5)
