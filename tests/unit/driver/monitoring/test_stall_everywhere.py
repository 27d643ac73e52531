"""One rank loops for 40 s: page, status, metrics, explain and the report show the same culprit, line and seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest

from elastic.driver import events
from elastic.driver.commandline.running_jobs import job_tables
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.status_line_text import one_line
from elastic.driver.monitoring.explain.animation import film
from elastic.driver.monitoring.explain.findings import Advice, FindingKind, JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.report_page import PageJob, page
from elastic.driver.monitoring.explain.sentences import sections
from elastic.driver.monitoring.explain.timeline_rows import STATES, WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.prometheus_metrics import JobMetrics, families
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Times, Worker
from harness.golden import recorded
from harness.published import STORE, WHY, published, starts

A, B, C = (Worker("h", slot) for slot in range(3))
LINE = "train.py:12"
SETTINGS = Settings(np=3, workers_min=1, workers_max=3, elastic=True)
KILL = events.KillWorker(B, because(ReasonKind.BUSY, for_s=40.0, rates="", where=""))


class Surfaces:
    """All consumers of the events of one job, which begins at 100: 10 commits per second until 120, then rank 1
    loops.
    """

    def __init__(self) -> None:
        spent = TimeSpent(JobView())
        self.page = PageModel(spent, name="bert", command=["train.py"], least=1, most=3)
        self.figures, self.story = JobMetrics(spent), JobHistory(spent)
        self.rows = WorkerRows(spent.view)
        start = starts(A, B, C)
        self.note(events.HostsChanged({"h": 3}), start, 98.0)
        for worker in (A, B, C):
            self.note(events.WorkerConnected(worker, 7), [], 99.0)
            self.note(events.WorkerReady(worker, 0, None, STORE), [], 99.5)
        self.note(events.TimePassed(), [published(1, A, B, C)], 100.0)
        for at in (105.0, 110.0, 115.0, 120.0):
            self.spent(at, int(10 * (at - 100.0)))
            self.page.go_on(at)
        for worker in (A, C):
            self.note(events.WorkerProgressed(worker, 1, 7, "gradients", 1.0), [], 121.0)

    def note(self, event: events.Event, actions: Sequence[events.Action], at: float) -> None:
        self.page.view.note(event, actions, at)

    def spent(self, at: float, number: int) -> None:
        times = Times(training=at - 100.0)
        self.note(events.WorkerSpent(A, 1, times, "training", Commit(1, number)), [], at)

    def loops(self, until: float) -> None:
        """Rank 0 continues to report its time, and the driver finds the line."""
        self.note(events.WorkerLocated(B, 1, LINE), [], 125.1)
        for at in range(125, int(until), 5):
            self.spent(float(at), 200)
            self.page.go_on(float(at))

    # ---- results

    def now(self, at: float) -> None:
        self.page.go_on(at)
        self.figures.spent.go_on(at)
        self.story.go_on(at)

    def findings(self, what: FindingKind) -> list[dict]:
        found = findings(self.story, JournalState(SETTINGS, runs=True))
        return [each.facts for each in found if each.what is what]

    def metrics(self) -> dict[str, list]:
        return {each.name: each.samples for each in families(self.figures)}

    def report(self) -> tuple[str, dict]:
        found = findings(self.story, JournalState(SETTINGS, runs=False))
        text = page(PageJob(self.story, self.rows, found))
        [data] = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
        return text, json.loads(data)

    def cells(self) -> dict[int, dict]:
        return {row["rank"]: row for row in self.page.worker_rows().values()}


def culprits_of(facts: dict) -> tuple[list[tuple[int, str, str]], float]:
    return [(c["rank"], c["worker"], c["line"]) for c in facts["culprits"]], facts["seconds"]


CULPRIT = [(1, "h:1#1", LINE)]


def test_ongoing_stall_is_shown_on_all_surfaces():
    job = Surfaces()
    job.loops(160.0)
    job.now(160.0)
    # The page, and status, which reads the same state.
    assert culprits_of(job.page.state.values["stall"]) == (CULPRIT, 40.0)
    cells = job.cells()
    assert [cells[rank]["state"] for rank in range(3)] == ["waiting", "stalled", "waiting"]
    assert LINE in cells[1]["note"] and cells[0]["awaits"] == (1,) == cells[2]["awaits"]
    status = "\n".join(job_tables.status(job.page.full(160.0)))
    recorded("messages", status, LINE)
    recorded("messages", one_line(job.page.state), LINE)
    job.page.report(0, {"tokens_per_s": 800.0}, 119.0)
    [row] = [r for r in job_tables.status(job.page.full(160.0)) if "tokens_per_s" in r]
    assert "41.0 s" in row
    listed = job_tables.job_row("bert", 1, 98.0, ["train.py"], job.page.full(160.0))
    assert listed["stalled"] and "stalled" in job_tables.jobs([listed], 160.0)[1]
    assert job.page.state.values["goodput"]["job"]["stalled"] == 40.0
    assert job.page.state.values["goodput"]["workers"]["stalled"] == 120.0
    # Prometheus.
    [sample] = job.metrics()["elastic_stall_seconds"]
    assert sample.labels == {"rank": "1", "worker": "h:1#1", "line": LINE} and sample.value == 40.0
    assert job.metrics()["elastic_stalled_seconds"][0].value == 40.0
    parts = {s.labels["part"]: s.value for s in job.metrics()["elastic_job_spent_seconds"]}
    assert parts["stalled"] == 40.0
    # explain, and its page.
    [facts] = job.findings(FindingKind.STALLS_NOW)
    assert culprits_of(facts) == (CULPRIT, 40.0)
    [time] = job.findings(FindingKind.TIME)
    assert time["job"]["stalled"] == 40.0 and time["workers"]["stalled"] == 120.0
    advice = [each["advice"] for each in job.findings(FindingKind.ADVICE)]
    assert Advice.LOOK_AT_LINE.value in advice and Advice.COMMIT_MORE_OFTEN.value not in advice
    text, data = job.report()
    assert LINE in text and [each[:2] for each in data["stalls"]] == [[22.0, 62.0]]


@pytest.mark.parametrize("killed", [False, True])
def test_stall_is_shown_after_its_end_or_a_kill(killed):
    job = Surfaces()
    job.loops(160.0)
    job.now(159.0)
    if killed:
        job.note(events.TimePassed(), [KILL, events.BreakWorld(1, [A, C], WHY)], 160.0)
        job.note(events.WorkerExited(B, -9), [], 160.1)
        job.note(events.WorkerReady(A, 1, Commit(1, 200), STORE), [], 160.2)
        job.note(events.WorkerReady(C, 1, Commit(1, 200), STORE), [published(2, A, C)], 160.2)
    else:
        job.note(events.WorkerProgressed(A, 1, 7), [], 160.0)
        job.note(events.WorkerProgressed(C, 1, 7), [], 160.0)
    job.now(165.0)
    end = "killed" if killed else "resumed"
    assert job.page.state.values["stall"] is None
    [past] = job.page.state.series["stalls"]
    assert culprits_of(past) == (CULPRIT, 40.0) and past["end"] == end
    assert f"rank 1 (h:1#1) at {LINE}" in "\n".join(job_tables.status(job.page.full(165.0)))
    assert {row["state"] for rank, row in job.cells().items() if rank is not None} == {"training"}
    assert job.metrics()["elastic_stall_seconds"] == []
    [sample] = job.metrics()["elastic_last_stall_seconds"]
    assert (sample.labels["rank"], sample.labels["line"], sample.value) == ("1", LINE, 40.0)
    assert job.metrics()["elastic_stalled_seconds"][0].value == 40.0
    assert job.metrics()["elastic_stalls"][0].value == 1.0
    [facts] = job.findings(FindingKind.STALL)
    assert culprits_of(facts) == (CULPRIT, 40.0) and facts["end"] == end
    assert not job.findings(FindingKind.STALLS_NOW)
    assert job.findings(FindingKind.TIME)[0]["job"]["stalled"] == 40.0
    text, data = job.report()
    assert LINE in text
    spans = {
        row: [
            (round(start + 98.0, 3), round(until + 98.0, 3))
            for start, until, state, *_ in each
            if STATES[state] == wanted
        ]
        for wanted, row, each in [
            ("waiting", "h:0", data["rows"]["h:0"]),
            ("stalled", "h:1", data["rows"]["h:1"]),
            ("waiting", "h:2", data["rows"]["h:2"]),
        ]
    }
    assert spans == {f"h:{slot}": [(120.0, 160.0)] for slot in range(3)}
    assert "<svg" in film(job.story, job.rows)


def test_rates_fall_to_zero_and_rise_again():
    job = Surfaces()
    seen = []
    for at in (120.0, 122.1, 124.0, 126.0, 140.0):
        job.now(at)
        seen.append(job.page.state.values["rate"])
    assert seen[0] == 10.0 and seen == sorted(seen, reverse=True) and seen[-2:] == [0.0, 0.0]
    assert 0.0 < seen[2] < seen[1] < 10.0
    assert job.metrics()["elastic_commits_per_second"][0].value == 0.0
    points = [*job.page.state.series["speed"]]
    assert points[-1][1] == 0.0 and [at for at, _ in points] == sorted(at for at, _ in points)
    job.note(events.WorkerProgressed(A, 1, 7), [], 160.0)
    job.spent(163.0, 230)
    job.now(163.0)
    assert job.page.state.values["rate"] == 10.0
    assert [*job.page.state.series["speed"]][-2:] == [[160.0, 0.0], [163.0, 10.0]]


def test_rate_falls_once_commits_are_overdue_without_reported_waits():
    """As when every rank loops, or the only one."""
    job = Surfaces()
    job.note(events.WorkerProgressed(A, 1, 7), [], 121.5)
    job.spent(125.0, 240)
    for at, rate in ((130.0, 8.0), (135.5, 8.0), (137.0, 0.0), (170.0, 0.0)):
        job.now(at)
        assert job.page.state.values["rate"] == rate


def test_every_finding_has_a_sentence():
    job = Surfaces()
    job.loops(160.0)
    for number in range(20):
        since = 200.0 + 20 * number
        job.note(events.WorkerProgressed(A, 1, 7), [], since - 1.0)
        job.note(events.WorkerProgressed(A, 1, 8, "gradients", 1.0), [], since + 1.0)
        job.note(events.WorkerProgressed(A, 1, 8), [], since + 11.0)
    [more] = job.findings(FindingKind.MORE_STALLS)
    assert more == {"count": 9, "seconds": pytest.approx(79.0 + 8 * 11.0)}
    found = sections(findings(job.story, JournalState(SETTINGS, runs=True)))
    assert all(text for each in found.values() for _, text in each)
