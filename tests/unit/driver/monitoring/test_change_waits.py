"""Workers that wait to join or leave until the others reach a commit: log, page, ``status`` and ``explain``."""

from __future__ import annotations

from typing import Any

from elastic.driver.commandline.running_jobs import job_tables
from elastic.driver.events import Action, Event, PrepareChange, Report
from elastic.driver.membership.membership import Phase
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.findings import FindingKind, JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_spent import TimeSpent
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import MembershipConversation, checked, exited, has, hosts, leaving
from harness.golden import recorded


class Job(MembershipConversation):
    """Two members that train in generation 2, and the readers of the job's events."""

    def __init__(self) -> None:
        super().__init__(np=2, workers_min=1, workers_max=4)
        spent = TimeSpent(JobView())
        self.page = PageModel(spent, name="bert", command=["train.py"], least=1, most=4)
        self.story = JobHistory(spent)
        self.tell(hosts(h=2))
        self.connect("h:0", "h:1")
        for running in (False, True):
            self.ready("h:0", "h:1", running=running)
        self.resume()
        assert self.m.phase is Phase.TRAINING

    def _handle(self, event: Event) -> list[Action]:
        actions = self.m.handle(event, self.now)
        self.m.check()
        self.page.view.note(event, actions, self.now)
        return actions

    def newcomer(self) -> None:
        """A third worker is ready to join, and the members answer with their number of commits."""
        self.tell(hosts(h=3))
        assert has(PrepareChange, self.join("h:2"))
        self.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
        assert self.m.worlds.change.check == 4

    @property
    def shown(self) -> dict[str, Any] | None:
        """The wait as the page and ``status`` receive it."""
        self.page.go_on(self.now)
        found: dict[str, Any] | None = self.page.state.values["change_wait"]
        return found

    def found(self, kind: FindingKind) -> list[dict[str, Any]]:
        self.story.go_on(self.now)
        every = findings(self.story, JournalState(self.m.worlds.settings, runs=True))
        kept = [each for each in every if each.what is kind]
        for each in kept:
            recorded("messages", sentence(each))
        return [each.facts for each in kept]


def reminders(actions: list[Action]) -> list[dict[str, Any]]:
    return [
        dict(each.about.facts)
        for each in actions
        if isinstance(each, Report)
        and each.about is not None
        and each.about.kind is ReasonKind.AWAITS_COMMIT
    ]


def test_newcomer_that_waits_for_a_commit_is_shown_with_the_seconds():
    job = Job()
    job.newcomer()
    began = job.now
    job.wait(9)
    assert job.shown is None and not job.found(FindingKind.CHANGE_WAITS_NOW)
    lines = reminders(job.wait(33 - (job.now - began)))
    assert [(each["joining"], each["leaving"]) for each in lines] == [(1, 0)]
    assert 29.9 < lines[0]["for_s"] < 30.1 and 569 < lines[0]["within_s"] < 571
    recorded("messages", str(because(ReasonKind.AWAITS_COMMIT, **lines[0])))
    shown: dict[str, Any] = job.shown or {}
    assert (shown["joining"], shown["leaving"], shown["workers"]) == (1, 0, ["h:2#1"])
    assert abs(shown["for_s"] - 33) < 0.1
    [line] = [each for each in job_tables.status(job.page.full(job.now)) if "33 s" in each]
    recorded("messages", line)
    [facts] = job.found(FindingKind.CHANGE_WAITS_NOW)
    assert facts["joining"] == 1 and abs(facts["for_s"] - 33) < 0.1


def test_reminders_of_a_wait_become_rarer_and_end_with_its_deadline():
    job = Job()
    job.newcomer()
    times = [each["for_s"] for each in reminders(job.wait(700))]
    assert [round(each) for each in times] == [30, 60, 120, 240, 480]
    assert job.m.phase is Phase.GATHERING  # broken up after elastic_timeout_s


def test_wait_that_a_commit_ends_is_a_finding_of_the_past():
    job = Job()
    job.newcomer()
    job.wait(40)
    job.ready("h:0", "h:1", commit=(2, 4))
    assert job.m.generation == 3
    job.wait(2)
    assert job.shown is None and not job.found(FindingKind.CHANGE_WAITS_NOW)
    [facts] = job.found(FindingKind.CHANGE_WAIT)
    assert facts["reached"] is True and facts["joining"] == 1 and 40 < facts["for_s"] < 41


def test_worker_that_waits_to_leave_is_counted_apart():
    job = Job()
    job.tell(leaving("h:1"))
    job.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
    lines = reminders(job.wait(31))
    assert [(each["joining"], each["leaving"]) for each in lines] == [(0, 1)]
    shown: dict[str, Any] = job.shown or {}
    assert (shown["joining"], shown["leaving"]) == (0, 1)
    recorded("messages", str(because(ReasonKind.AWAITS_COMMIT, **lines[0])))


def test_wait_is_over_if_the_newcomer_is_lost():
    job = Job()
    job.newcomer()
    job.wait(20)
    job.tell(exited("h:2", -9))
    assert not reminders(job.wait(60))
    assert job.shown is None and not job.found(FindingKind.CHANGE_WAITS_NOW)
