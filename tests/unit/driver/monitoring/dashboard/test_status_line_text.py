"""State of a job in one line."""

from elastic.driver.events import HostsChanged, ReportRecovery, TimePassed, WorkerSpent
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.status_line_text import one_line
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import as_sentence
from elastic.protocol.messages import Commit, Times, Worker
from harness.golden import recorded
from harness.published import published, starts

A = Worker("h", 0)


def test_line_grows_with_the_known_facts():
    page = PageModel(TimeSpent(JobView()), name="bert", command=[], least=1, most=2)
    recorded("page", one_line(page.state))
    page.view.note(HostsChanged({"h": 1}), [*starts(A), published(3, A)], 10.0)
    recorded("page", one_line(page.state))
    for at, number in ((10.0, 1), (14.0, 41)):
        spent = WorkerSpent(A, 3, Times(), "training", Commit(3, number))
        page.view.note(spent, [], at)
    recorded("page", one_line(page.state))
    page.report(0, {"loss": 0.123456, "step": 960}, 15.0)
    report = ReportRecovery(3, "recovery", as_sentence("lost h:1#1"), 1, 83.2, {}, 0)
    page.view.note(TimePassed(), [report], 16.0)
    recorded("page", one_line(page.state))


def test_remaining_time_is_shown_if_the_script_reports_its_number_of_steps():
    page = PageModel(TimeSpent(JobView()), name="bert", command=[], least=1, most=2)
    page.view.note(HostsChanged({"h": 1}), [*starts(A), published(3, A)], 10.0)
    page.report(0, {"step": 100, "steps": 2000}, 11.0)
    assert one_line(page.state).endswith("| step 100 of 2000")
    page.report(0, {"step": 300, "steps": 2000}, 31.0)
    recorded("page", one_line(page.state))
    page.report(0, {"step": 2000, "steps": 2000}, 100.0)
    page.report(0, {"step": 50, "steps": 2000}, 110.0)  # a step back
    assert one_line(page.state).endswith("| step 50 of 2000")
    page.report(0, {"step": 60, "steps": 55}, 300.0)  # more steps than there are
    assert one_line(page.state).endswith("| step 60")
    page.report(0, {"step": 70, "steps": 170}, 400.0)  # one report in 100 s
    recorded("page", one_line(page.state))
