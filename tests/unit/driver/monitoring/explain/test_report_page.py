"""Report page of a job: self-contained, and all text from the job is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser

from elastic.driver import events
from elastic.driver.journal.entries import decoded_header, encoded, header_of, readable
from elastic.driver.monitoring.explain.findings import JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.report_at_job_end import BEGINNING, RunReport, write_page
from elastic.driver.monitoring.explain.report_page import PageJob, page
from elastic.driver.monitoring.explain.timeline_rows import STATES, WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.reported_series import POINTS, ReportedSeries
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Commit, Worker
from elastic.protocol.report_values import Report
from harness.golden import raises, recorded, visible
from harness.published import STORE, published, starts

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&\'"\u2028$TITLE'
HOST = "<b>h</b>"
SETTINGS = Settings(np=2, workers_min=1, workers_max=2, elastic=True)


def worker(slot: int, incarnation: int = 1, host: str = HOST) -> Worker:
    return Worker(host, slot, incarnation)


def evil_job(record_event) -> None:
    """Run a failing job of two workers whose host, exception and traceback are HTML."""
    one, two = worker(0), worker(1)
    record_event(events.HostsChanged({HOST: 2}), starts(one, two), 10.0)
    for each in (one, two):
        record_event(events.WorkerConnected(each, 1), [], 11.0)
        record_event(events.WorkerReady(each, 0, None, STORE, running=True), [], 11.5)
    record_event(events.WorkerReady(two, 0, None, STORE), [published(1, one, two)], 12.0)
    raised = events.WorkerRaised(one, 1, Commit(1, 3), f"ValueError: {EVIL}", f"Traceback\n{EVIL}")
    record_event(raised, [events.EndJob(1, because(ReasonKind.TOLD, text=EVIL))], 20.0)
    record_event(events.WorkerExited(one, 1, "", EVIL), [], 21.0)


class Elements(HTMLParser):
    """The elements that a browser would create."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        self.loaded += [v for name, v in attributes if name in ("src", "href") and v != "data:,"]


def evil_page() -> str:
    story, reported = JobHistory(TimeSpent(JobView())), ReportedSeries()
    rows = WorkerRows(story.view)
    evil_job(story.view.note)
    for step in (1, 2):
        reported.report(0, {EVIL: float(step), "said": EVIL}, 1000.0 + step)
    found = findings(story, JournalState(SETTINGS))
    return page(PageJob(story, rows, found, f"python {EVIL}", 990.0, reported))


def test_text_from_a_job_is_escaped():
    text = evil_page()
    elements = Elements()
    elements.feed(text)
    assert elements.tags.count("script") == 2, "the data, and the page's own"
    assert "img" not in elements.tags and "b" in elements.tags
    assert not elements.handlers and not elements.loaded
    assert EVIL not in text
    assert "alert(&quot;x&quot;)" in text, "it is shown"


def test_policy_forbids_other_scripts_and_loading():
    text = evil_page()
    own = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_page_contains_the_data_of_the_job():
    data = json.loads(re.findall(r'id="data">(.*?)</script>', evil_page())[0])
    assert data["seconds"] == 11.0 and list(data["rows"]) == [f"{HOST}:0", f"{HOST}:1"]
    states = [[STATES[span[2]] for span in row] for row in data["rows"].values()]
    assert states == [
        ["starting", "joining", "training", "lost"],
        ["starting", "joining", "training"],
    ]
    assert data["worlds"] == [[2.0, 2, 1]]
    assert data["series"][EVIL] == [[1.0, 1.0], [2.0, 2.0]]


def test_run_writes_its_report_at_the_end(tmp_path):
    view = JobView()
    run = RunReport(tmp_path / "r.html", ["python", "train.py"], SETTINGS, TimeSpent(view))
    evil_job(lambda event, actions, now: view.note(event, actions, 1.79e9 + now))
    run.report(Report(0, 2, 1, str(worker(0)), {"loss": 0.5, "step": 1}, 1e9))
    run.write()
    text = (tmp_path / "r.html").read_text()
    assert "0.5" in text
    recorded("explain", visible(text))
    assert [each.name for each in tmp_path.iterdir()] == ["r.html"]


def test_report_of_a_successor_driver_states_its_start_in_the_middle(tmp_path):
    view = JobView()
    run = RunReport(tmp_path / "r.html", ["python", "train.py"], SETTINGS, TimeSpent(view))
    view.adopt({worker(0): (1, 0), worker(1): (2, 1)}, 4, 1.79e9)
    view.note(events.WorkerExited(worker(1), -9), [], 1.79e9)
    run.write()
    text = (tmp_path / "r.html").read_text()
    assert "SIGKILL" in text
    recorded("explain", visible(text))


def test_run_whose_start_was_refused_keeps_an_earlier_report(tmp_path):
    (tmp_path / "r.html").write_text(f"{BEGINNING} earlier")
    run = RunReport(tmp_path / "r.html", ["python"], SETTINGS, TimeSpent(JobView()))
    assert not run.write()
    assert (tmp_path / "r.html").read_text() == f"{BEGINNING} earlier"


def test_job_without_known_facts_has_a_page():
    story = JobHistory(TimeSpent(JobView()))
    found = findings(story, JournalState(SETTINGS))
    recorded("explain", visible(page(PageJob(story, WorkerRows(story.view), found))))


def test_argument_that_is_not_unicode_is_shown_escaped(tmp_path):
    view = JobView()
    run = RunReport(
        tmp_path / "r.html", ["python", "train.py", "\udcff"], SETTINGS, TimeSpent(view)
    )
    evil_job(lambda event, actions, now: view.note(event, actions, 1.79e9 + now))
    run.write()
    assert "udcff" in (tmp_path / "r.html").read_text()
    header = header_of(SETTINGS, command=readable(["python", "\udcff"]))
    assert decoded_header(encoded(header)).command == ["python", "\\udcff"]


def test_unwritable_report_is_logged(tmp_path):
    (tmp_path / "taken").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "taken", tmp_path / "no" / "page.html", tmp_path / "pipe"):
        with raises(Invalid):
            write_page(file, f"{BEGINNING} page")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "taken"]
    assert (tmp_path / "pipe").is_fifo()


def test_report_when_another_kind_of_file_exists_then_keeps_the_file(tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "report.html"
    script.write_text("import torch\n")
    write_page(report, f"{BEGINNING} 1")
    write_page(report, f"{BEGINNING} 2")
    with raises(Invalid):
        write_page(script, f"{BEGINNING} 1")
    assert (script.read_text(), report.read_text()) == ("import torch\n", f"{BEGINNING} 2")


# ---- kept values --------------------------------------------------------------------------------------------------


def test_long_series_is_thinned_out_repeatedly():
    kept = ReportedSeries()
    for step in range(10 * POINTS):
        kept.report(0, {"loss": float(step)}, float(step))
    series = kept.series["loss"]
    assert POINTS / 2 <= len(series.points) <= POINTS
    assert (series.first, series.last, series.count) == (0.0, 10 * POINTS - 1, 10 * POINTS)
    gaps = {b[0] - a[0] for a, b in zip(series.points, series.points[1:], strict=False)}
    assert gaps == {16.0}


def test_repeated_steps_are_counted():
    kept = ReportedSeries()
    for step in (1, 2, 3, 3, 4, 2, 3, 4, 5):
        kept.report(0, {"step": step}, 0.0)
    assert (kept.steps, kept.again) == (5, 2)


def test_value_that_is_not_a_number_is_no_series():
    kept = ReportedSeries()
    kept.report(0, {"nan": float("nan"), "on": True, "deep": {"a": 1}, "none": None}, 0.0)
    kept.report(1, {"loss": 1.0}, 0.0)
    kept.report(0, {"loss": 2.0}, 0.0)
    kept.report(1, {"loss": 3.0}, 0.0)
    assert list(kept.series) == ["loss"]
    assert [value for _, value in kept.series["loss"].points] == [1.0, 2.0]


def test_recovery_has_rows():
    view = JobView()
    rows = WorkerRows(view)
    one, two, again = worker(0), worker(1), worker(1, 2)
    view.note(events.HostsChanged({HOST: 2}), starts(one, two), 0.0)
    view.note(events.WorkerConnected(one, 1), [published(1, one, two)], 1.0)
    view.note(events.WorkerExited(two, -9), starts(again), 2.0)
    recovered = events.ReportRecovery(2, "recovery", because(ReasonKind.ENTERING), 1, 500.0, {}, 0)
    view.note(events.WorkerReady(one, 1, None, STORE), [published(2, one)], 3.0)
    view.note(events.WorkerConnected(one, 1), [recovered], 3.5)
    table = rows.table(4.0)
    assert table[f"{HOST}:1"] == [[0.0, 1.0, 0, 1, -1], [1.0, 2.0, 2, 1, 1], [2.0, 4.0, 0, 2, -1]]
    assert rows.recoveries == [(3.0, 3.5, 2, "recovery")]
    assert rows.deaths == [(2.0, f"{HOST}:1", -9)]


def test_member_that_is_about_to_exit_does_not_train_outside_the_world():
    view = JobView()
    rows = WorkerRows(view)
    one, two = worker(0), worker(1)
    view.note(events.HostsChanged({HOST: 2}), starts(one, two), 0.0)
    view.note(events.WorkerReady(one, 0, None, STORE), [published(1, one, two)], 1.0)
    broken = events.BreakWorld(1, [one, two], because(ReasonKind.ENTERING))
    view.note(events.WorkerQuit(two, 1, 0, "sys.exit(0)"), [broken], 2.0)
    view.note(events.WorkerReady(one, 1, None, STORE), [published(2, one)], 3.0)
    states = [STATES[int(span[2])] for span in rows.table(4.0)[f"{HOST}:1"]]
    assert states == ["starting", "training", "recovering"]
