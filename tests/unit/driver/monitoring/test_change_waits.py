"""Workers that wait to join or leave until the others reach a commit: log, page, ``status`` and ``explain``."""

from __future__ import annotations

from typing import Any

from elastic.driver.commandline.running_jobs import job_tables
from elastic.driver.events import Action, PrepareChange, Report
from elastic.driver.membership.membership import Phase
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.findings import FindingKind
from elastic.driver.reasons import ReasonKind, because
from harness.conversation import checked, exited, has, hosts, leaving
from harness.explained import ExplainedConversation
from harness.golden import recorded


class Job(ExplainedConversation):
    """Two members that train in generation 2, and the live page."""

    page: PageModel

    def __init__(self) -> None:
        super().__init__(2, workers_min=1, workers_max=4)
        assert self.m.phase is Phase.TRAINING

    def follow(self) -> None:
        self.page = PageModel(self.spent, name="bert", command=["train.py"], least=1, most=4)

    def newcomer(self) -> None:
        """A third worker is ready to join, and the members answer with their number of commits."""
        self.tell(hosts(h=3))
        assert has(PrepareChange, self.join("h:2"))
        self.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
        assert {*self.m.worlds.change.checks.values()} == {4}

    @property
    def shown(self) -> dict[str, Any] | None:
        """The wait as the page and ``status`` receive it."""
        self.page.go_on(self.now)
        found: dict[str, Any] | None = self.page.state.values["change_wait"]
        return found


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
