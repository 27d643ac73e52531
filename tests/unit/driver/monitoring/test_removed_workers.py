"""A removed worker that does not exit in time is killed, and no reader of the job counts it as lost."""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    Action,
    DrainRequested,
    Event,
    HostLost,
    KillWorker,
    LetGo,
    RemoveRequested,
    Report,
    ScaleRequested,
    StartWorker,
)
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.animation import film
from elastic.driver.monitoring.explain.findings import FindingKind
from elastic.driver.monitoring.explain.timeline_rows import WorkerRows
from elastic.driver.monitoring.prometheus_metrics import JobMetrics
from elastic.driver.reasons import ReasonKind
from harness.conversation import exited, hosts, names, the, worker
from harness.explained import ExplainedConversation
from harness.golden import recorded

LEAVE_S = 30.0


class WatchedConversation(ExplainedConversation):
    """Every reader of the job follows."""

    def follow(self) -> None:
        self.metrics = JobMetrics(self.spent)
        self.rows = WorkerRows(self.spent.view)
        self.page = PageModel(self.spent, name="", command=[], least=1, most=4)

    def row(self, slot: str) -> dict[str, object]:
        row: dict[str, object] = self.page.worker_rows()[slot]
        return row

    def has_no_loss(self) -> bool:
        assert not self.rows.deaths and 'stroke-width="3"' not in film(self.story, self.rows)
        assert not self.metrics.lost and not any(self.metrics.fenced.values())
        states = {row["state"] for row in self.page.worker_rows().values()}
        assert "lost" not in states
        return not self.story.losses() and not self.found(FindingKind.INCIDENT)


def log_of(actions: list[Action]) -> list[str]:
    return [each.text for each in actions if isinstance(each, Report)]


def overdue(talk: WatchedConversation, request: Event) -> list[Action]:
    """Remove h:1 by this request. It does not exit, and is killed."""
    talk.tell(request)
    assert "h:1#1" in names(talk.stop_all(), LetGo)
    kill = the(KillWorker, talk.wait(LEAVE_S + 0.1))
    assert (str(kill.worker), kill.reason.kind) == ("h:1#1", ReasonKind.NOT_LEFT)
    recorded("log", str(kill.reason))
    assert talk.row("h:1")["state"] == "leaving"
    recorded("page", str(talk.row("h:1")["note"]))
    return talk.tell(exited("h:1", -9))


@pytest.mark.parametrize(
    "request_", [ScaleRequested(7, 1), RemoveRequested(7, worker("h:1"))], ids=["scaled", "removed"]
)
def test_removed_worker_when_killed_for_not_exiting_then_is_no_loss(request_):
    talk = WatchedConversation(2, workers_min=1)
    actions = overdue(talk, request_)
    recorded("log", log_of(actions))
    assert talk.row("h:1")["state"] == "done"
    [found] = talk.found(FindingKind.OVERDUE)
    assert found["worker"] == "h:1#1" and found["at_s"] > LEAVE_S
    assert talk.has_no_loss()


def test_slot_of_a_killed_removed_worker_when_the_job_grows_then_is_used_without_a_cooldown():
    talk = WatchedConversation(2, workers_min=1, slot_attempts=1)
    overdue(talk, ScaleRequested(7, 1))
    assert names(talk.tell(ScaleRequested(8, 2)), StartWorker) == ["h:1#2"]


def test_starting_worker_when_no_longer_needed_then_its_kill_is_no_loss():
    talk = WatchedConversation(2, workers_min=1)
    talk.tell(hosts(h=3))
    assert names(talk.tell(ScaleRequested(7, 3))) == ["h:2#1"]
    assert names(talk.tell(ScaleRequested(8, 2)), KillWorker) == ["h:2#1"]
    talk.tell(exited("h:2", -9))
    assert talk.row("h:2")["state"] == "done" and talk.has_no_loss()


def test_removed_worker_when_its_host_is_lost_then_is_no_loss():
    talk = WatchedConversation(2, workers_min=1)
    talk.tell(hosts(h=2, g=1))
    talk.tell(ScaleRequested(7, 3))
    talk.join("g:0")
    talk.stop_all()
    talk.resume()
    talk.tell(DrainRequested(8, "g"))
    assert "g:0#1" in names(talk.stop_all(), LetGo)
    talk.tell(HostLost("g", "no answer"))
    assert talk.row("g:0")["state"] == "done" and not talk.metrics.lost
