"""Late islands in the state of the job, in explain and on the page, from reports of merges."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.driver.events import WorkerMerged
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.findings import FindingKind, JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.late_islands import ISLANDS, LateIslands
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.protocol.messages import Worker
from harness.golden import recorded

A = Worker("eu-1", 0)


def merged(merges: int, *absent: str, names: Sequence[str] = (), waited_s: float = 0.0):
    return WorkerMerged(A, 1, merges, 10 * merges, 3, [*absent], waited_s, [*names])


REPORTS = (
    (1.0, merged(1, names=["ap", "eu", "us"], waited_s=0.5)),
    (2.0, merged(4, "us", waited_s=2.0)),
    (4.0, merged(9, "us")),  # merges 5 to 8 had no report, and the same late islands as merge 4
    (6.0, merged(12, "ap", waited_s=1.0)),
    (8.0, merged(20, waited_s=0.25)),
)


def test_merges_without_a_report_have_the_late_islands_of_the_report_before():
    late = LateIslands()
    for at, each in REPORTS:
        late.receive(each, at)
    assert {name: each.merges for name, each in late.islands.items()} == {"us": 8, "ap": 8}
    assert [(e.first_at, e.last_at, e.late) for e in late.islands.values()] == [
        (2.0, 4.0, False),
        (6.0, 6.0, False),
    ]
    assert late.waited_s == 3.75
    assert [(each["name"], each["late_merges"]) for each in late.rows()] == [
        ("ap", 8),
        ("eu", 0),
        ("us", 8),
    ]


def test_merges_when_the_job_resumes_from_an_older_checkpoint_are_not_counted_backwards():
    late = LateIslands()
    late.receive(merged(9, "us"), 1.0)
    late.receive(merged(3, "us"), 2.0)
    assert late.islands["us"].merges == 2 and late.islands["us"].late


def test_names_of_late_islands_are_limited():
    late = LateIslands()
    for number in range(ISLANDS + 1):
        late.receive(merged(number + 1, f"island-{number}"), float(number))
    assert len(late.islands) == ISLANDS and late.more


def test_explain_when_islands_were_late_names_the_islands_and_the_cost():
    story = JobHistory(TimeSpent(JobView()))
    for at, each in REPORTS[:-1]:
        story.view.note(each, [], at)
    [found] = [
        each for each in findings(story, JournalState(None)) if each.what is FindingKind.ISLANDS
    ]
    assert found.facts is not None
    assert (found.facts["merges"], found.facts["waited_s"], found.facts["size"]) == (12, 3.5, 3)
    assert [(each["name"], each["late"]) for each in found.facts["islands"]] == [
        ("us", False),
        ("ap", True),
    ]
    recorded("explain", sentence(found))


def test_page_when_islands_merge_has_a_row_for_each_island():
    page = PageModel(TimeSpent(JobView()), name="gpt", command=["train.py"], least=2, most=4)
    for at, each in REPORTS[:-1]:
        page.view.note(each, [], at)
    rows = page.state.values["merged"]["rows"]
    assert [(each["name"], each["late_merges"], each["late"]) for each in rows] == [
        ("ap", 1, True),
        ("eu", 0, False),
        ("us", 8, False),
    ]
