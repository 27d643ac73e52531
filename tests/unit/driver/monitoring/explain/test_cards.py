"""Cards of the report: whole numbers, each name once."""

from __future__ import annotations

import html
import re

import pytest

from elastic.driver import events
from elastic.driver.monitoring.explain.findings import JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.report_page import PageJob, page
from elastic.driver.monitoring.explain.sentences import number
from elastic.driver.monitoring.explain.timeline_rows import WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.reported_series import ReportedSeries
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.protocol.messages import Times, Worker


def cards(reported: ReportedSeries) -> list[tuple[str, str]]:
    story = JobHistory(TimeSpent(JobView()))
    found = findings(story, JournalState(None))
    text = page(PageJob(story, WorkerRows(story.view), found, reported=reported))
    shown = re.findall(r'<div class="tile"><b[^>]*>(.*?)</b><span>(.*?)</span>', text)
    return [(html.unescape(name), html.unescape(value)) for value, name in shown]


@pytest.mark.parametrize("steps_first", [True, False])
def test_steps_has_one_card_when_a_report_without_a_step_contains_their_number(steps_first):
    reported = ReportedSeries()
    more = [{"validation": 2.5, "steps": 900}, {"step": 7, "loss": 0.5, "steps": 900}]
    for metrics in more if steps_first else more[::-1]:
        reported.report(0, metrics, 1.0)
    names = [name for name, _ in cards(reported)]
    assert names.count("steps") == 1
    assert dict(cards(reported))["steps"] == "1"
    assert "steps" not in reported.shown() and "step" not in reported.shown()


def test_steps_is_an_ordinary_metric_if_no_step_is_reported():
    reported = ReportedSeries()
    reported.report(0, {"steps": 900}, 1.0)
    assert dict(cards(reported))["steps"] == "900"


def test_metric_named_like_a_card_of_the_job_is_distinguished():
    reported = ReportedSeries()
    name = "workers lost / restarted or joined"
    reported.report(0, {name: 3.5}, 1.0)
    names = [each for each, _ in cards(reported)]
    assert len(names) == len(set(names)) and any(name in each and each != name for each in names)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (5294.3, "5,294"),
        (52943.3, "52,943"),
        (1234567.0, "1,234,567"),
        (0.000123456, "0.0001235"),
        (1.23456e-7, "1.235e-07"),
        (2.5e9, "2.5e+09"),
        (-0.5, "-0.5"),
        (0.99999, "1"),
        (9999.96, "10,000"),
        (3.0, "3"),
        (0.0, "0"),
    ],
)
def test_number_has_four_digits_and_an_exponent_only_if_shorter(value, shown):
    assert number(value) == shown


def test_steps_per_second_have_a_card_without_script_changes():
    story = JobHistory(TimeSpent(JobView()))
    story.view.adopt({Worker("h", 0): (1, 0)}, 2, 0.0)
    for steps, at in ((100, 10.0), (150, 15.0)):
        spent = events.WorkerSpent(Worker("h", 0), 2, Times(), "training", steps=steps)
        story.view.note(spent, [], at)
    text = page(PageJob(story, WorkerRows(story.view), findings(story, JournalState(None))))
    assert "<b>10</b><span>steps per second</span>" in text
